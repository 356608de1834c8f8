"""Memory of a run whose ranks and engines are on one machine's CPUs, as the tiny recipes' are."""

from dataclasses import replace

from gtpo_megatron.companions.planner.phases import Part, trainer_gpu
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.orchestration.cpu_memory import Taken, memory_needed
from gtpo_megatron.weights.architecture import Architecture

MOST_PARAMETERS = 2_000_000_000
"""Of a model for which the plan has a line about CPUs."""

FRAGMENTATION = 0.4
"""Of a pass's memory, which comes and goes in blocks of many sizes: with it SmolLM2's run is planned at 8.7 GiB and had
9.2 (``memory/peak_gib`` of two steps), the quickstart's at 4.4, and had 3.8."""

_OF_A_PASS: tuple[Part, ...] = ("activations", "output layer", "workspace")


def cpu_memory(config: RunConfig, request: PlanRequest) -> list[Taken]:
    """What a run on CPUs takes at its peak, an update, by part; empty for a model that nobody would train there.

    Args:
        config: of the run.
        request: of the plan; the list is empty unless it has the recipe's layout, and its model is a folder.
    """
    layout, shape = request.own_layout, request.shape
    if layout is None or not isinstance(shape, Architecture) or shape.num_parameters > MOST_PARAMETERS:
        return []
    on_cpu = replace(request, kernels="torch")
    stages = [trainer_gpu(on_cpu, layout, stage).phases["train"] for stage in range(layout.pipeline)]
    of_a_pass = sum(parts.get(part, 0) for parts in stages for part in _OF_A_PASS)
    return [
        *memory_needed(config, shape, free_bytes=memory()[1]),
        Taken(
            by=f"passes of {request.batch.largest_micro_batch:,} tokens",
            num_bytes=layout.num_ranks // layout.pipeline * int((1 + FRAGMENTATION) * of_a_pass),
            lowered_by="update.micro_batch_tokens",
        ),
    ]
