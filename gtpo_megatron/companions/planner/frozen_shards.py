"""Frozen weights that replicas share, by the actor's rules: bytes that a rank keeps, has gathered, and receives."""

from dataclasses import dataclass
from itertools import pairwise

from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.trainer_state import Sizes, layer_tensors, vocabulary_elements
from gtpo_megatron.weights.model_shape import LayerKind

ALIGNMENT = 256
"""Bytes: ``actor/model/frozen_shards.py`` has the same number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBytes:
    """Of a rank of a pipeline stage.

    Attributes:
        kept: bytes that it has at any time, those that no other rank has included.
        whole: most bytes that are gathered at once in a pass: two units that follow each other.
        pushed: most bytes that are gathered at once in a push: the layers that a bucket has slices of.
        received: bytes that come from other ranks in a forward pass; as many come in a backward pass.
    """

    kept: int
    whole: int
    pushed: int
    received: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes of what is gathered together: this rank's parts, all of them, and what no other rank has."""

    parts: int
    whole: int
    alone: int


def frozen_bytes(request: PlanRequest, layout: Layout, stage: int) -> FrozenBytes | None:
    """What a rank of a stage holds of the weights below adapters; None: it has all of its part, shared with nobody."""
    if not request.adapter.shard_frozen:
        return None
    shape, weight_bytes = request.shape, request.weight_bytes
    elements = vocabulary_elements(shape, layout, request.vocab_multiple)
    vocabulary = _unit(((elements, 1),), (), layout, weight_bytes)
    first, last = stage == 0, stage == layout.pipeline - 1
    of_kind: dict[LayerKind, _Unit] = {}
    for kind, _ in layers_of_stage(shape, layout, stage):
        of_kind[kind] = _unit(*layer_tensors(shape, layout, kind), layout, weight_bytes)
    layers: list[_Unit] = []
    passed: list[_Unit] = []  # in a forward pass
    whole = 0
    for chunk in range(layout.virtual):
        numbers = layout.layer_split.layers(shape.num_layers, chunk * layout.pipeline + stage)
        own = [of_kind[shape.layers_between(number, number + 1)[0][0]] for number in numbers]
        ends = [vocabulary] * (first and chunk == 0), [vocabulary] * (last and chunk == layout.virtual - 1)
        chain = [*ends[0], *own, *ends[1]]
        whole = max([whole, *(one.whole + other.whole for one, other in pairwise(chain))])
        layers += own
        passed += chain
    is_once = shape.tied_embeddings and layout.pipeline == 1
    held = passed[:-1] if is_once else passed
    # of a layer's bytes on all tensor-parallel ranks
    slices = min(unit.whole + unit.alone for unit in layers) * layout.tensor // request.engine.tensor
    in_bucket = min(len(layers), request.bucket_bytes // max(1, slices) + 2)
    return FrozenBytes(
        kept=sum(unit.parts + unit.alone for unit in held) + last * shape.hidden_size * weight_bytes,
        whole=whole,
        pushed=in_bucket * max(unit.whole for unit in layers) + (first or last) * vocabulary.whole,
        received=sum(unit.whole - unit.parts for unit in passed),
    )


def _unit(dense: Sizes, experts: Sizes, layout: Layout, weight_bytes: int) -> _Unit:
    kept = whole = alone = 0
    for tensors, replicas in ((dense, layout.data * layout.context), (experts, layout.expert_data)):
        if replicas == 1:
            alone += sum(elements * count for elements, count in tensors) * weight_bytes
            continue
        filled = sum(-(-elements * weight_bytes // ALIGNMENT) * ALIGNMENT * count for elements, count in tensors)
        part = -(-filled // (replicas * ALIGNMENT)) * ALIGNMENT
        kept += part
        whole += replicas * part
    return _Unit(kept, whole, alone)
