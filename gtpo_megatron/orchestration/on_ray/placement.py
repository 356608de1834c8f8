"""Places the processes of a run on nodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A node of the cluster.

    Attributes:
        node_id: Ray's name for it.
        host: host name of the node.
        num_gpus: number of its GPUs in Ray.
        num_cpus: number of its cores in Ray.
    """

    node_id: str
    host: str
    num_gpus: int
    num_cpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The node of every process.

    Attributes:
        ranks: nodes by global rank.
        engines: nodes of the rollout engines.
        reward: node of the reward process, the driver's.
        has_gpus: whether ranks and engines use GPUs.
    """

    ranks: tuple[ClusterNode, ...]
    engines: tuple[ClusterNode, ...]
    reward: ClusterNode
    has_gpus: bool


def place(
    parallel: ParallelConfig,
    *,
    num_engines: int,
    engine_gpus: int,
    nodes: Sequence[ClusterNode],
    colocated: bool = False,
) -> Placement:
    """Places ranks, engines and the reward process.

    With GPUs the nodes are filled in order of ranks, so that no tensor-parallel group is split over nodes if it fits on
    one. Each engine takes the first node with enough free GPUs. With CPUs the ranks are spread evenly, and the engines
    are on the first node, or on their ranks' nodes if colocated.

    Args:
        parallel: the trainer's layout.
        num_engines: number of rollout engines.
        engine_gpus: GPUs per engine.
        nodes: the nodes, the driver's first.
        colocated: the engines use the ranks' GPUs, in order.

    Raises:
        ConfigError: there are too few GPUs, or an engine does not fit on one node.
    """
    if not any(node.num_gpus for node in nodes):
        ranks = tuple(nodes[rank * len(nodes) // parallel.num_ranks] for rank in range(parallel.num_ranks))
        engines = [nodes[0]] * num_engines
        if colocated:
            engines = _on_ranks(ranks, num_engines=num_engines, engine_gpus=engine_gpus)
        if len(engines) < num_engines:
            raise ConfigError(
                f"rollout.placement='colocated': an engine of tensor_parallel_size={engine_gpus} lies on one node, and "
                f"its ranks are on several; take a divisor of {parallel.num_ranks // len(nodes)}, or fewer nodes"
            )
        return Placement(ranks=ranks, engines=tuple(engines), reward=nodes[0], has_gpus=False)
    free = {node.node_id: node.num_gpus for node in nodes}
    tensor = parallel.tensor_parallel_size
    block = tensor if tensor <= max(free.values()) else 1
    ranks_on_gpus: list[ClusterNode] = []
    for node in nodes:
        here = min(parallel.num_ranks - len(ranks_on_gpus), free[node.node_id] // block * block)
        ranks_on_gpus += [node] * here
        free[node.node_id] -= here
    if colocated:
        engines = _on_ranks(ranks_on_gpus, num_engines=num_engines, engine_gpus=engine_gpus)
    else:
        engines = [node for node in nodes for _ in range(free[node.node_id] // engine_gpus)][:num_engines]
    if len(ranks_on_gpus) < parallel.num_ranks or len(engines) < num_engines:
        there = ", ".join(f"{node.host} {node.num_gpus}" for node in nodes)
        needed = parallel.num_ranks + (0 if colocated else num_engines * engine_gpus)
        raise ConfigError(
            f"{parallel} and rollout.num_engines={num_engines} with tensor_parallel_size={engine_gpus} need "
            f"{needed} GPUs, those of an engine on one node; Ray has: {there}; "
            f"take fewer ranks, or more machines"
        )
    return Placement(ranks=tuple(ranks_on_gpus), engines=tuple(engines), reward=nodes[0], has_gpus=True)


def _on_ranks(ranks: Sequence[ClusterNode], *, num_engines: int, engine_gpus: int) -> list[ClusterNode]:
    """The node of each engine's ranks, for the engines whose ranks are all on one node."""
    shares = [ranks[index * engine_gpus : (index + 1) * engine_gpus] for index in range(num_engines)]
    return [share[0] for share in shares if len(share) == engine_gpus and len({node.node_id for node in share}) == 1]


def in_order(nodes: Sequence[ClusterNode], *, first: str) -> list[ClusterNode]:
    """The node with the id ``first`` (the driver's), then the others by host name, numbers in names as numbers."""
    return sorted(nodes, key=lambda node: (node.node_id != first, _natural(node.host), node.node_id))


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", host) if part]
