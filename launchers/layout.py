"""What will run where, for a person to read before submitting."""

from collections.abc import Iterator, Sequence

from gtpo_megatron.orchestration.on_ray.placement import Placement
from launchers.options import SlurmOptions


def layout_text(options: SlurmOptions, placement: Placement) -> str:
    """The trainer's axes and the engines, then every node with what is on it."""
    config, rollout = options.config, options.config.rollout
    kind = f"{options.gpus_per_node} GPUs each" if options.gpus_per_node else "no GPUs"
    lines = [
        f"run      {config.name}: {config.num_steps} steps of {config.data.prompts_per_step} prompts x "
        f"{rollout.group_size} responses",
        f"nodes    {options.nodes}, {kind}",
        f"trainer  {config.parallel}",
        f"engines  {rollout.num_engines} of tensor_parallel_size={rollout.tensor_parallel_size}, {rollout.placement}",
    ]
    return "\n".join([*lines, *_nodes(options, placement)]) + "\n"


def _nodes(options: SlurmOptions, placement: Placement) -> Iterator[str]:
    shares = options.config.rollout.placement == "colocated" and placement.has_gpus
    for index in range(options.nodes):
        ranks = [rank for rank, node in enumerate(placement.ranks) if node.node_id == str(index)]
        engines = [engine for engine, node in enumerate(placement.engines) if node.node_id == str(index)]
        parts = [_numbered("rank", ranks)] if ranks else []
        if engines:
            parts.append(_numbered("engine", engines) + (" on their GPUs" if shares else ""))
        parts += ["driver, rewards"] if index == 0 else []
        yield f"node {index}   {'; '.join(parts)}"


def _numbered(name: str, indices: Sequence[int]) -> str:
    return f"{name} {indices[0]}" if len(indices) == 1 else f"{name}s {indices[0]}-{indices[-1]}"
