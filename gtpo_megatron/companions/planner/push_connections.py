"""With how many other processes one talks in a push: each of them is a communicator of two under NCCL.

``weights/push/replicas.py`` chooses who sends to whom; this says the same in sizes, at most.
"""

from collections import Counter

from gtpo_megatron.companions.planner.hardware import COMMUNICATOR_BYTES
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.config.parallel import LayerSplit, engine_layers


def rank_connections(request: PlanRequest, layout: Layout) -> int:
    """Others that a trainer rank talks to."""
    if request.transport == "relay":
        return _colocated(request, layout)
    if request.transport == "process_group":
        return sum(demands // replicas + (demands % replicas > 0) for _, demands, replicas in _lines(request, layout))
    return 0


def worker_connections(request: PlanRequest, layout: Layout) -> int:
    """Others that a sampler worker talks to; with ``relay`` its rank does that."""
    if request.transport != "process_group":
        return 0
    return sum(
        shards * (replicas // demands + (replicas % demands > 0) + (0 < replicas % demands < demands < replicas))
        for shards, demands, replicas in _lines(request, layout)
    )


def connection_bytes(num_connections: int) -> int:
    """Bytes of their communicators on a GPU."""
    return num_connections * COMMUNICATOR_BYTES


def _lines(request: PlanRequest, layout: Layout) -> list[tuple[int, int, int]]:
    """For everything but experts, and for experts: shards a worker wants, workers that want one, ranks that have it."""
    engine = request.engine.tensor
    sources, takers = _overlapping_stages(request, layout)
    lines = [
        (
            sources * max(1, layout.tensor // engine),
            takers * max(1, engine // layout.tensor),
            layout.data * layout.context,
        )
    ]
    if request.shape.experts is not None:
        split = layout.expert if request.engine.expert_parallel else layout.expert_tensor
        others = layout.expert_tensor if request.engine.expert_parallel else layout.expert
        lines.append(
            (
                sources * others * max(1, split // engine),
                takers * max(1, engine // split),
                layout.expert_data,
            )
        )
    return lines


def _overlapping_stages(request: PlanRequest, layout: Layout) -> tuple[int, int]:
    """The trainer's stages that have layers of one stage of an engine, and all engines' stages that want one's."""
    layers, stages = request.shape.num_layers, request.engine.stages
    if stages == 1:
        return layout.pipeline, request.num_engines
    split = LayerSplit(layout.pipeline, layout.virtual, layout.last_layers)
    holder = {
        n: virtual % layout.pipeline for virtual in range(split.num_stages) for n in split.layers(layers, virtual)
    }
    pairs = {(holder[n], stage) for stage in range(stages) for n in engine_layers(layers, stages, stage)}
    sources, takers = (max(Counter(pair[side] for pair in pairs).values()) for side in (1, 0))
    return sources, request.num_engines * takers


def _colocated(request: PlanRequest, layout: Layout) -> int:
    """Connections of a rank that passes on: with those it receives from, and those it sends to."""
    engine, others = request.engine.tensor, layout.num_ranks - 1
    lines = _lines(request, layout)
    if request.engine.stages > 1:
        # a worker's layers are on ranks that pass on to workers of other layers; of replicas two may share a shard
        found = sum((1 + (replicas > 1)) * shards + -(-demands // replicas) for shards, demands, replicas in lines)
        return min(found, others)
    found = 0
    for index, (shards, _, _) in enumerate(lines):
        split = layout.tensor if index == 0 else layout.expert_tensor
        # of an own column they are the same; else a replica may serve the ends of two workers' demands besides
        found += shards - 1 if engine in (1, split) or split == 1 else 2 * shards + layout.pipeline
    return min(found, others)
