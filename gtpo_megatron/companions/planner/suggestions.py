"""Changes that would make a model fit, if no layout does: each is tried by planning again."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from gtpo_megatron.companions.planner.hardware import MIB
from gtpo_megatron.companions.planner.phases import longest_sequence_bytes
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.search import anything_fits, assess_all
from gtpo_megatron.config.adapter import AdapterConfig

FRACTIONS = (2, 4, 8)
"""The cache is made smaller, and the cluster larger, by the first of these that helps."""
ADAPTER_RANK = 32
"""Projections that every layer of a mixture of experts has, too."""


Choice: TypeAlias = tuple[str, PlanRequest]
"""Overrides of the command line, and what they make of the request."""


def suggestions(request: PlanRequest) -> list[str]:
    """Overrides, each followed by the layout that fits with it.

    First every saving alone; if none is enough, all of them together; then more GPUs, and those with all savings if
    nothing else helps. Low-rank adapters come last: they are another training.
    """
    return [*_of_all_weights(request), *_first_that_fits(_adapters(request))]


def _of_all_weights(request: PlanRequest) -> list[str]:
    found = [line for choices in _savings(request) for line in _first_that_fits(choices)]
    found = found or _first_that_fits(_together(request))
    larger = _more_gpus(request)
    found += _first_that_fits(larger)
    both = [(f"{gpus} {savings}", changed) for gpus, grown in larger for savings, changed in _together(grown)]
    return found or _first_that_fits(both)


def _first_that_fits(choices: list[Choice]) -> list[str]:
    for overrides, changed in choices:
        if anything_fits(changed):
            best = assess_all(changed)[0][0]
            return [f"{overrides}: {best.layout}, recompute {best.layout.recompute}, {best.reason()}"]
    return []


def _savings(request: PlanRequest) -> Iterator[list[Choice]]:
    """Kinds of changes that save memory on the same GPUs, each with its choices from mild to strong."""
    batch, engine = request.batch, request.engine
    if batch.micro_batch_tokens > batch.max_sequence_tokens:
        yield [_single_sequences(request)]
    if _is_engine(request, 2 * engine.tensor):
        yield [_wider_engines(request)]
    elif (longer := _longer_engines(request)) is not None:
        yield [longer]
    yield _caches(request)
    if request.offload_fraction < 1:
        yield [("--optimizer.offload-fraction 1", replace(request, offload_fraction=1.0))]


def _together(request: PlanRequest) -> list[Choice]:
    """The widest engines, one sequence a micro-batch and another cache; then with the optimizer on the host, too."""
    widest, words = request, ""
    while _is_engine(request, 2 * widest.engine.tensor):
        overrides, widest = _wider_engines(widest)
        words = f"{overrides} "
    choices = []
    for cache, smaller in _caches(widest) or [("", widest)]:
        micro, smallest = _single_sequences(smaller)
        choices.append((f"{words}{micro} {cache}".rstrip(), smallest))
    words, smallest = choices[-1]
    choices.append((f"{words} --optimizer.offload-fraction 1", replace(smallest, offload_fraction=1.0)))
    return choices


def _single_sequences(request: PlanRequest) -> Choice:
    tokens = request.batch.max_sequence_tokens
    changed = replace(request, batch=replace(request.batch, micro_batch_tokens=tokens))
    return f"--update.micro-batch-tokens {tokens}", changed


def _adapters(request: PlanRequest) -> list[Choice]:
    """Adapters, with the learning rate of the recipes; then with smaller caches, too."""
    if request.adapter.is_on:
        return []
    words = f"--adapter.rank {ADAPTER_RANK} --optimizer.learning-rate 1e-5"
    adapted = replace(request, adapter=AdapterConfig(rank=ADAPTER_RANK))
    return [(words, adapted), *((f"{words} {cache}", smaller) for cache, smaller in _caches(adapted))]


def _wider_engines(request: PlanRequest) -> Choice:
    """Doubles ``rollout.tensor_parallel_size``, which halves the number of engines."""
    changed = replace(request, engine=replace(request.engine, tensor=2 * request.engine.tensor))
    return (
        f"--rollout.tensor-parallel-size {changed.engine.tensor} --rollout.num-engines {changed.num_engines}",
        changed,
    )


def _longer_engines(request: PlanRequest) -> Choice | None:
    """Doubles the stages of engines that have all GPUs of their nodes, and the nodes; None if that divides nothing."""
    engine, node = request.engine, request.cluster.gpus_per_node
    stages = 2 * engine.stages
    fills = engine.num_gpus == engine.nodes * node
    if not fills or stages > request.shape.num_layers or request.cluster.num_engine_gpus % (stages * engine.tensor):
        return None
    changed = replace(request, engine=replace(engine, stages=stages, nodes=2 * engine.nodes, most=0))
    return (
        f"--rollout.pipeline-parallel-size {stages} --rollout.nodes-per-engine {2 * engine.nodes} "
        f"--rollout.num-engines {changed.num_engines}",
        changed,
    )


def _caches(request: PlanRequest) -> list[Choice]:
    """Smaller caches that hold a sequence of full length; if it holds none now, larger ones, from many sequences down.

    None if every smaller one would be too small.
    """
    least = math.ceil(longest_sequence_bytes(request) / MIB)
    has = request.engine.cache_bytes // MIB
    sizes = [has // factor for factor in FRACTIONS if has // factor >= least]
    if has < least:
        most = request.engine.max_sequences
        sizes = [least * max(1, most // factor) for factor in (1, *FRACTIONS, most)]
    return [
        (
            f"--rollout.kv-cache-mib {mebibytes}",
            replace(request, engine=replace(request.engine, cache_bytes=mebibytes * MIB)),
        )
        for mebibytes in sizes
    ]


def _is_engine(request: PlanRequest, tensor: int) -> bool:
    """Whether engines of so many ranks divide the model, the node and the GPUs."""
    return tensor <= request.cluster.gpus_per_node and request.divides_engine(tensor)


def _more_gpus(request: PlanRequest) -> list[Choice]:
    """Twice, four and eight times as many, if those are whole nodes; the share that generates unchanged."""
    cluster, choices = request.cluster, []
    for factor in FRACTIONS:
        count = cluster.num_gpus * factor
        if count <= cluster.gpus_per_node or count % cluster.gpus_per_node == 0:
            grown = replace(cluster, num_gpus=count, num_rollout_gpus=cluster.num_rollout_gpus * factor)
            engine = replace(request.engine, most=0)
            choices.append((f"--gpus {count}", replace(request, cluster=grown, engine=engine, own_layout=None)))
    return choices
