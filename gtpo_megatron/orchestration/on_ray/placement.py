"""Places the processes of a run on nodes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.run import RunConfig
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
        engines: nodes of each rollout engine, the one with its engine core first.
        reward: node of the reward process, the driver's.
        has_gpus: whether ranks and engines use GPUs.
    """

    ranks: tuple[ClusterNode, ...]
    engines: tuple[tuple[ClusterNode, ...], ...]
    reward: ClusterNode
    has_gpus: bool


def place_run(config: RunConfig, nodes: Sequence[ClusterNode], *, has_engines: bool = True) -> Placement:
    """Places the processes of a run, or its ranks alone.

    Raises:
        ConfigError: as ``place``.
    """
    return place(
        config.parallel,
        num_engines=config.rollout.num_engines if has_engines else 0,
        engine_gpus=config.rollout.ranks_per_engine,
        engine_nodes=config.rollout.nodes_per_engine,
        nodes=nodes,
        colocated=config.rollout.placement == "colocated",
    )


def place(
    parallel: ParallelConfig,
    *,
    num_engines: int,
    engine_gpus: int,
    engine_nodes: int = 1,
    nodes: Sequence[ClusterNode],
    colocated: bool = False,
) -> Placement:
    """Places ranks, engines and the reward process.

    With GPUs the nodes are filled in order of ranks, so that no tensor-parallel group is split over nodes if it fits on
    one. Each engine takes the first node with enough free GPUs, or as many nodes as it is to have. With CPUs the ranks
    are spread evenly, and the engines are on the first node or nodes, or on their ranks' nodes if colocated.

    Args:
        parallel: the trainer's layout.
        num_engines: number of rollout engines.
        engine_gpus: GPUs per engine, on all its nodes together.
        engine_nodes: nodes per engine, each with an equal part of it.
        nodes: the nodes, the driver's first.
        colocated: the engines use the ranks' GPUs, in order.

    Raises:
        ConfigError: there are too few GPUs, or an engine does not fit on so many nodes.
    """
    on_node = engine_gpus // engine_nodes
    if not any(node.num_gpus for node in nodes):
        ranks = tuple(nodes[rank * len(nodes) // parallel.num_ranks] for rank in range(parallel.num_ranks))
        if engine_nodes > len(nodes):
            raise ConfigError(
                f"rollout.nodes_per_engine={engine_nodes}: Ray has {len(nodes)} nodes; take fewer, or let as many join "
                f"(cluster.num_nodes)"
            )
        engines = [tuple(nodes[:engine_nodes])] * num_engines
        if colocated:
            engines = _on_ranks(ranks, num_engines=num_engines, engine_nodes=engine_nodes, on_node=on_node)
        if len(engines) < num_engines:
            raise ConfigError(
                f"rollout.placement='colocated': {on_node} workers of an engine of tensor_parallel_size={engine_gpus} "
                f"lie on one node, and their ranks are on several; take a divisor of "
                f"{parallel.num_ranks // len(nodes)}, or fewer nodes"
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
        engines = _on_ranks(ranks_on_gpus, num_engines=num_engines, engine_nodes=engine_nodes, on_node=on_node)
    else:
        parts = {node: free[node.node_id] // on_node for node in nodes}
        engines = _on_free_gpus(parts, num_engines=num_engines, engine_nodes=engine_nodes)
    if len(ranks_on_gpus) < parallel.num_ranks or len(engines) < num_engines:
        there = ", ".join(f"{node.host} {node.num_gpus}" for node in nodes)
        needed = parallel.num_ranks + (0 if colocated else num_engines * engine_gpus)
        raise ConfigError(
            f"{parallel} and rollout.num_engines={num_engines} with tensor_parallel_size={engine_gpus} need "
            f"{needed} GPUs, those of an engine on {'one node' if engine_nodes == 1 else f'{engine_nodes} nodes'}; Ray "
            f"has: {there}; take fewer ranks, or more machines, or more rollout.nodes_per_engine"
        )
    return Placement(ranks=tuple(ranks_on_gpus), engines=tuple(engines), reward=nodes[0], has_gpus=True)


def _on_ranks(
    ranks: Sequence[ClusterNode], *, num_engines: int, engine_nodes: int, on_node: int
) -> list[tuple[ClusterNode, ...]]:
    """The nodes of each engine's ranks, for the engines of which each part's ranks are on one node."""
    parts = [ranks[first : first + on_node] for first in range(0, num_engines * engine_nodes * on_node, on_node)]
    engines = [parts[index * engine_nodes : (index + 1) * engine_nodes] for index in range(num_engines)]
    return [
        tuple(part[0] for part in engine)
        for engine in engines
        if all(len(part) == on_node and len({node.node_id for node in part}) == 1 for part in engine)
    ]


def _on_free_gpus(
    parts: Mapping[ClusterNode, int], *, num_engines: int, engine_nodes: int
) -> list[tuple[ClusterNode, ...]]:
    """The first nodes with room, for as many engines as find some.

    Args:
        parts: number of engines' parts that each node has room for.
        num_engines: engines that are wanted.
        engine_nodes: nodes of each, all different.
    """
    left, engines = dict(parts), list[tuple[ClusterNode, ...]]()
    while len(engines) < num_engines:
        found = tuple(node for node, room in left.items() if room)[:engine_nodes]
        if len(found) < engine_nodes:
            break
        left |= {node: left[node] - 1 for node in found}
        engines.append(found)
    return engines


def in_order(nodes: Sequence[ClusterNode], *, first: str) -> list[ClusterNode]:
    """The node with the id ``first`` (the driver's), then the others by host name, numbers in names as numbers."""
    return sorted(nodes, key=lambda node: (node.node_id != first, _natural(node.host), node.node_id))


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", host) if part]
