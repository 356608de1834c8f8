"""What autograd keeps of a layer between forward and backward, tensor by tensor.

Two sets of kernels are known. ``te``: Transformer Engine's layers on a GPU, as ``actor/model.py`` builds them there.
``torch``: Megatron's local layers with torch's attention, as on a CPU. They differ: Transformer Engine fuses a norm
with the projection behind it, rotates in one kernel, keeps no float32 copies, and keeps the gated MLP's input alone
where torch also keeps the two factors of the gate. docs/planning.md says which of the two has been measured.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gtpo_megatron.planner.layout import Layout, Recompute
from gtpo_megatron.planner.shape import ModelShape

Kernels = Literal["te", "torch"]

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that is kept for the backward pass.

    Attributes:
        what: for people.
        width: elements per token, over all ranks.
        element_bytes: of its dtype.
        split: ``tensor``: over the tensor-parallel ranks; ``sequence``: over them under sequence parallelism only;
            ``whole``: every rank has all of it.
    """

    what: str
    width: float
    element_bytes: int
    split: Literal["tensor", "sequence", "whole"]

    def bytes_per_token(self, layout: Layout) -> float:
        """On one rank, for a token that the rank's context-parallel share holds."""
        ranks = {"tensor": layout.tensor, "sequence": layout.sequence_split, "whole": 1}[self.split]
        return self.width * self.element_bytes / ranks


@lru_cache(maxsize=256)
def saved_by_layer(shape: ModelShape, kernels: Kernels, weight_bytes: int, recompute: Recompute) -> tuple[Saved, ...]:
    """Every tensor that one layer keeps.

    Args:
        shape: of the model.
        kernels: which implementation of the layer.
        weight_bytes: per element of weights and activations: 2 or 4.
        recompute: ``full`` keeps the layer's input only; ``selective`` leaves out what attention would keep besides its
            inputs and its output.
    """
    if recompute == "full":
        return (Saved("layer input", shape.hidden_size, weight_bytes, "sequence"),)
    attention = _attention(shape, kernels, weight_bytes, recompute)
    mlp = _mlp(shape, kernels, weight_bytes) if shape.experts is None else _experts(shape, kernels, weight_bytes)
    return (*attention, *mlp)


def saved_by_final_norm(shape: ModelShape, kernels: Kernels, weight_bytes: int) -> tuple[Saved, ...]:
    """What the norm behind the last layer keeps; its output belongs to the output layer."""
    return _norm("final norm", shape.hidden_size, 1, kernels, weight_bytes, "sequence")


def layer_bytes_per_token(layout: Layout, saved: tuple[Saved, ...]) -> float:
    """Of all given tensors, on one rank."""
    return sum(tensor.bytes_per_token(layout) for tensor in saved)


def _norm(what: str, width: float, rows: float, kernels: Kernels, weight_bytes: int, split: str) -> tuple[Saved, ...]:
    """Input and factors of an RMSNorm; its output belongs to whoever reads it."""
    place: Literal["tensor", "sequence"] = "tensor" if split == "tensor" else "sequence"
    factor = Saved(f"{what}: factors", rows, FLOAT32_BYTES, place)
    if kernels == "te":
        return (Saved(f"{what}: input", width, weight_bytes, place), factor)
    return (
        Saved(f"{what}: input in float32", width, FLOAT32_BYTES, place),
        Saved(f"{what}: normalised in float32", width, FLOAT32_BYTES, place),
        factor,
    )


def _attention(shape: ModelShape, kernels: Kernels, weight_bytes: int, recompute: Recompute) -> tuple[Saved, ...]:
    query, key_value = shape.query_width, shape.key_value_width
    saved = [
        *_norm("input norm", shape.hidden_size, 1, kernels, weight_bytes, "sequence"),
        Saved("input of the qkv projection", shape.hidden_size, weight_bytes, "sequence"),
        Saved("queries", query, weight_bytes, "tensor"),
        Saved("keys", key_value, weight_bytes, "tensor"),
        Saved("input of the output projection", query, weight_bytes, "tensor"),
    ]
    if shape.qk_norm:
        saved += _norm("query norm", query, shape.num_heads, kernels, weight_bytes, "tensor")
        key_norm = _norm("key norm", key_value, shape.num_query_groups, kernels, weight_bytes, "tensor")
        # without a float32 copy, torch keeps the view of qkv itself
        saved += key_norm[1:] if kernels == "torch" and weight_bytes == FLOAT32_BYTES else key_norm
    if kernels == "te":
        saved.append(Saved("values", key_value, weight_bytes, "tensor"))
    else:
        saved += [
            # not fused: cosine and sine, made anew for queries and for keys
            Saved("rotary factors", 4 * shape.head_size, weight_bytes, "whole"),
            Saved("qkv, of which values are a view", query + 2 * key_value, weight_bytes, "tensor"),
        ]
    if recompute == "none":
        saved.append(Saved("attention: log-sum-exp", shape.num_heads, FLOAT32_BYTES, "tensor"))
        if kernels == "torch":
            saved.append(Saved("attention: output of each document", query, weight_bytes, "tensor"))
    return tuple(saved)


def _mlp(shape: ModelShape, kernels: Kernels, weight_bytes: int) -> tuple[Saved, ...]:
    return (
        *_norm("MLP norm", shape.hidden_size, 1, kernels, weight_bytes, "sequence"),
        Saved("input of gate and up", shape.hidden_size, weight_bytes, "sequence"),
        *_gated(shape.ffn_size, kernels, weight_bytes, "tensor"),
    )


def _gated(width: float, kernels: Kernels, weight_bytes: int, split: Literal["tensor", "sequence"]) -> list[Saved]:
    saved = [Saved("gate and up", 2 * width, weight_bytes, split)]
    if kernels == "torch":
        saved += [
            Saved("activated gate", width, weight_bytes, split),
            Saved("up, a copy", width, weight_bytes, split),
        ]
    return [*saved, Saved("input of down", width, weight_bytes, split)]


def _experts(shape: ModelShape, kernels: Kernels, weight_bytes: int) -> tuple[Saved, ...]:
    """Tokens, sharded evenly over experts; experts are not split over tensor-parallel ranks, their tokens are."""
    assert shape.experts is not None
    copies = shape.experts.experts_per_token
    saved = [
        *_norm("MLP norm", shape.hidden_size, 1, kernels, weight_bytes, "sequence"),
        Saved("input of the router", shape.hidden_size, weight_bytes, "sequence"),
        Saved("router: logits and probabilities", 2 * shape.experts.num_experts, FLOAT32_BYTES, "sequence"),
        Saved("input of gate and up, dispatched", copies * shape.hidden_size, weight_bytes, "sequence"),
        *_gated(copies * shape.experts.ffn_size, kernels, weight_bytes, "sequence"),
    ]
    return tuple(saved)


def in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Chunks of layers whose activations a stage holds at the peak of Megatron's schedule.

    One forward, one backward: stage ``i`` of ``p`` has run ``p - i - 1`` micro-batches ahead, and one more is in work.
    Interleaved with ``v`` chunks: ``2 (p - i - 1) + (v - 1) p`` chunks ahead, and one in work.
    """
    ahead = layout.pipeline - stage - 1
    if layout.virtual > 1:
        ahead = 2 * ahead + (layout.virtual - 1) * layout.pipeline
    return min(ahead + 1, num_micro_batches * layout.virtual)


def layers_of_chunk(shape: ModelShape, layout: Layout) -> int:
    """Layers in one chunk of a stage."""
    return shape.num_layers // (layout.pipeline * layout.virtual)
