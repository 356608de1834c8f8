"""Which process lives on which node: neighbouring ranks together, the engine where there is room."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of the cluster.

    Attributes:
        node_id: Ray's name for it.
        host: its host name.
        num_gpus: that Ray offers there.
    """

    node_id: str
    host: str
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A node for every process.

    Attributes:
        ranks: by global rank.
        engine: of the rollout engine.
        reward: of the reward process, on the driver's node.
        has_gpus: ranks and engine have GPUs of their own; False: everything is on CPUs.
    """

    ranks: tuple[Node, ...]
    engine: Node
    reward: Node
    has_gpus: bool


def place(parallel: ParallelConfig, *, engine_gpus: int, nodes: Sequence[Node]) -> Placement:
    """Spreads a run over nodes.

    On GPUs the nodes are filled one after the other, so that neighbours in the trainer's world are neighbours in the
    machine, and no tensor-parallel group is cut by a node's edge where it fits on one. The engine takes the first node
    that has enough GPUs left. On CPUs the ranks are spread evenly, and the engine is on the first node.

    Args:
        parallel: the trainer's layout.
        engine_gpus: GPUs of the engine.
        nodes: the driver's first.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    if not any(node.num_gpus for node in nodes):
        ranks = tuple(nodes[rank * len(nodes) // parallel.num_ranks] for rank in range(parallel.num_ranks))
        return Placement(ranks=ranks, engine=nodes[0], reward=nodes[0], has_gpus=False)
    free = {node.node_id: node.num_gpus for node in nodes}
    tensor = parallel.tensor_parallel_size
    block = tensor if tensor <= max(free.values()) else 1
    ranks_on_gpus: list[Node] = []
    for node in nodes:
        here = min(parallel.num_ranks - len(ranks_on_gpus), free[node.node_id] // block * block)
        ranks_on_gpus += [node] * here
        free[node.node_id] -= here
    engine = next((node for node in nodes if free[node.node_id] >= engine_gpus), None)
    if len(ranks_on_gpus) < parallel.num_ranks or engine is None:
        there = ", ".join(f"{node.host} {node.num_gpus}" for node in nodes)
        raise ConfigError(
            f"{parallel} and rollout.tensor_parallel_size={engine_gpus} need {parallel.num_ranks + engine_gpus} GPUs, "
            f"{engine_gpus} of them on one node; Ray has: {there}; take fewer ranks, or more machines"
        )
    return Placement(ranks=tuple(ranks_on_gpus), engine=engine, reward=nodes[0], has_gpus=True)


def in_order(nodes: Sequence[Node], *, first: str) -> list[Node]:
    """The node with the id ``first`` (the driver's), then the others by host name, numbers in names as numbers."""
    return sorted(nodes, key=lambda node: (node.node_id != first, _natural(node.host), node.node_id))


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", host) if part]
