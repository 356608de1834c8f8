"""What will run where, for a person to read before submitting."""

from collections.abc import Iterator, Sequence

from gtpo_megatron.orchestration.placement import Placement
from launchers.options import SlurmOptions


def layout_text(options: SlurmOptions, placement: Placement | None) -> str:
    """The trainer's axes, then every node with its ranks; see ``check_world`` for the placement."""
    config = options.config
    parallel, tensor = config.parallel, config.rollout.tensor_parallel_size
    kind = f"{options.gpus_per_node} GPUs each" if options.gpus_per_node else "no GPUs"
    lines = [
        f"run      {config.name}: {config.num_steps} steps of {config.data.prompts_per_step} prompts x "
        f"{config.rollout.group_size} responses",
        f"nodes    {options.nodes}, {kind}",
        f"trainer  {parallel}",
        f"engine   tensor_parallel_size={tensor}",
    ]
    return "\n".join([*lines, *_nodes(options, placement)]) + "\n"


def _nodes(options: SlurmOptions, placement: Placement | None) -> Iterator[str]:
    num_ranks = options.config.parallel.num_ranks
    for index in range(options.nodes):
        if placement is None:
            a_node = options.gpus_per_node
            yield f"node {index}   {_ranks(range(index * a_node, (index + 1) * a_node))}, which engines share"
            continue
        ranks = [rank for rank in range(num_ranks) if placement.ranks[rank].node_id == str(index)]
        parts = [_ranks(ranks)] if ranks else []
        parts += _engines([node.node_id for node in placement.engines].count(str(index)))
        parts += ["driver, rewards"] if index == 0 else []
        yield f"node {index}   {'; '.join(parts)}"


def _engines(num: int) -> list[str]:
    return [] if num == 0 else ["engine" if num == 1 else f"{num} engines"]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
