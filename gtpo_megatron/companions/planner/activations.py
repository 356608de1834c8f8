"""Bytes that autograd keeps of a layer between forward and backward, tensor by tensor.

Two sets of kernels are known. ``te``: Transformer Engine's layers on a GPU, which
``actor/model/policy_model.py`` builds there.
``torch``: Megatron's local layers with torch's attention, on a CPU. They differ: Transformer Engine fuses a norm
with the projection behind it, rotates in one kernel, and keeps only the input of a gated MLP's activation; torch keeps
the two factors of the gate too. docs/planning_reference.md says which has been measured.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gtpo_megatron.companions.planner.layout import Layout, Recompute
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet, LayerKind, ModelShape

Kernels = Literal["te", "torch"]

FLOAT32_BYTES = 4
INDEX_BYTES = 8
CHUNK_TOKENS = 64
"""Of a delta net's; ``actor/model/delta_net.py`` has the same number."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that is kept for the backward pass.

    Attributes:
        what: description of the tensor.
        width: elements per token, over all ranks.
        element_bytes: bytes of an element.
        split: ``tensor``: over the tensor-parallel ranks; ``sequence``: over them under sequence parallelism only;
            ``whole``: every rank has all of it; ``expert``: as ``sequence``, of copies that were dispatched to experts;
            ``gathered``: the same, of copies that every rank of an expert-tensor group has.
    """

    what: str
    width: float
    element_bytes: int
    split: Literal["tensor", "sequence", "whole", "expert", "gathered"]

    def bytes_per_token(self, layout: Layout, imbalance: float = 1.0) -> float:
        """Bytes per rank, for a token of the rank's context-parallel share.

        Args:
            layout: of the ranks.
            imbalance: see ``Layout.busiest_load``; the rank is the busiest one.
        """
        match self.split:
            case "tensor":
                share = 1 / layout.tensor
            case "sequence":
                share = 1 / layout.sequence_split
            case "whole":
                share = 1.0
            case "expert":
                share = layout.busiest_load(imbalance) / layout.sequence_split
            case "gathered":
                share = layout.busiest_load(imbalance) * layout.expert_tensor / layout.sequence_split
        return self.width * self.element_bytes * share


@lru_cache(maxsize=256)
def saved_by_layer(
    shape: ModelShape, kernels: Kernels, weight_bytes: int, recompute: Recompute, kind: LayerKind, tensor: int = 1
) -> tuple[Saved, ...]:
    """Every tensor that one layer keeps.

    Args:
        shape: of the model.
        kernels: which implementation of the layer.
        weight_bytes: per element of weights and activations: 2 or 4.
        recompute: ``full`` keeps the layer's input only; ``selective`` leaves out what attention would keep besides its
            inputs and its output, ``experts`` what experts and their router would keep besides their input.
        kind: of the layer.
        tensor: ranks that share the layer's matrices.
    """
    if recompute == "full":
        return (Saved("layer input", shape.hidden_size, weight_bytes, "sequence"),)
    if kind.has_delta_net:
        attention = _delta_net(shape, weight_bytes, recompute)
    elif shape.latents is None:
        attention = _attention(shape, kernels, weight_bytes, recompute, tensor)
    else:
        attention = _latent_attention(shape, kernels, weight_bytes, recompute)
    if not kind.has_experts:
        return (*attention, *_mlp(shape, kernels, weight_bytes))
    mlp = _expert_input(shape, weight_bytes)
    return (*attention, *mlp) if recompute == "experts" else (*attention, *mlp, *_experts(shape, kernels, weight_bytes))


def saved_by_final_norm(shape: ModelShape, weight_bytes: int) -> tuple[Saved, ...]:
    """Tensors that the norm after the last layer keeps; its output is counted with the output layer."""
    return _norm("final norm", shape.hidden_size, 1, weight_bytes, "sequence")


def layer_bytes_per_token(layout: Layout, saved: tuple[Saved, ...], imbalance: float = 1.0) -> float:
    """Bytes per rank and token of all given tensors; arguments as of ``Saved.bytes_per_token``."""
    return sum(tensor.bytes_per_token(layout, imbalance) for tensor in saved)


def _norm(what: str, width: float, rows: float, weight_bytes: int, split: str) -> tuple[Saved, ...]:
    """Input and factors of an RMSNorm; its output is counted with the module that reads it."""
    place: Literal["tensor", "sequence"] = "tensor" if split == "tensor" else "sequence"
    return (
        Saved(f"{what}: input", width, weight_bytes, place),
        Saved(f"{what}: factors", rows, FLOAT32_BYTES, place),
    )


def _norm_over_heads(what: str, width: float) -> tuple[Saved, ...]:
    """The same in plain torch, whatever the kernels."""
    return (
        Saved(f"{what}: input in float32", width, FLOAT32_BYTES, "tensor"),
        Saved(f"{what}: normalised in float32", width, FLOAT32_BYTES, "tensor"),
        Saved(f"{what}: factors", 1, FLOAT32_BYTES, "tensor"),
    )


def _layer_norms(shape: ModelShape, names: tuple[str, str], weight_bytes: int) -> tuple[Saved, ...]:
    """Norms of hidden states, before attention or MLP and behind."""
    here = {"pre": names[:1], "post": names[1:], "sandwich": names}[shape.norm_placement]
    norms = (_norm(name, shape.hidden_size, 1, weight_bytes, "sequence") for name in here)
    return tuple(itertools.chain.from_iterable(norms))


def _attention(
    shape: ModelShape, kernels: Kernels, weight_bytes: int, recompute: Recompute, tensor: int
) -> tuple[Saved, ...]:
    query, key_value = shape.query_width, shape.key_value_width
    saved = [
        *_layer_norms(shape, ("input norm", "norm behind attention"), weight_bytes),
        Saved("input of the qkv projection", shape.hidden_size, weight_bytes, "sequence"),
        Saved("queries", query, weight_bytes, "tensor"),
        Saved("keys", key_value, weight_bytes, "tensor"),
        Saved("input of the output projection", query, weight_bytes, "tensor"),
    ]
    if shape.qk_norm:
        if shape.qk_norm_spans_heads:
            query_norm, key_norm = _norm_over_heads("query norm", query), _norm_over_heads("key norm", key_value)
        else:
            query_norm = _norm("query norm", query, shape.num_heads, weight_bytes, "tensor")
            key_norm = _norm("key norm", key_value, shape.num_query_groups, weight_bytes, "tensor")
        # without a float32 copy, a norm's input is a view of qkv: keys always, queries unless several groups are joined
        is_view = kernels == "torch" and (weight_bytes == FLOAT32_BYTES or not shape.qk_norm_spans_heads)
        saved += query_norm[1:] if is_view and shape.num_query_groups == tensor else query_norm
        saved += key_norm[1:] if is_view else key_norm
    gate = query if shape.has_output_gate else 0
    if gate:
        saved.append(Saved("output of attention, before its gate", query, weight_bytes, "tensor"))
        saved.append(Saved("gate", gate, weight_bytes if kernels == "te" else FLOAT32_BYTES, "tensor"))
    if kernels == "te":
        saved.append(Saved("values", key_value, weight_bytes, "tensor"))
    else:
        saved += [
            # not fused: cosine and sine, made anew for queries and for keys
            Saved("rotary factors", 2 * shape.head_size, weight_bytes, "whole"),
            Saved("qkv, of which values are a view", query + gate + 2 * key_value, weight_bytes, "tensor"),
        ]
    if recompute != "selective":
        saved.append(Saved("attention: log-sum-exp", shape.num_heads, FLOAT32_BYTES, "tensor"))
    return tuple(saved)


def _delta_net(shape: ModelShape, weight_bytes: int, recompute: Recompute) -> tuple[Saved, ...]:
    """``actor/model/delta_net.py``: plain torch whatever the kernels; the delta rule itself is in float32."""
    delta = shape.delta
    assert delta is not None
    value, heads = delta.value_width, delta.num_value_heads
    saved = [
        *_norm("input norm", shape.hidden_size, 1, weight_bytes, "sequence"),
        Saved("input of the projections", shape.hidden_size, weight_bytes, "sequence"),
        Saved("decays and strengths, as they are made", 3 * heads, FLOAT32_BYTES, "tensor"),
        Saved(
            "convolution: input, input with zeros before each sequence, output",
            3 * delta.conv_width,
            weight_bytes,
            "tensor",
        ),
        Saved("convolution: places of tokens", 6, INDEX_BYTES, "whole"),
        Saved("output of the delta rule", value, FLOAT32_BYTES, "tensor"),
        Saved("norm of outputs: factors", heads, FLOAT32_BYTES, "tensor"),
        Saved("output, normalised, and times the norm's weight", 2 * value, weight_bytes, "tensor"),
        Saved("gate, and activated", 2 * value, FLOAT32_BYTES, "tensor"),
        Saved("input of the output projection", value, weight_bytes, "tensor"),
    ]
    if recompute == "selective":
        saved.append(Saved("queries, keys and values", delta.conv_width, weight_bytes, "tensor"))
        return (*saved, Saved("decays", heads, FLOAT32_BYTES, "tensor"))
    return (*saved, *_delta_rule(delta))


def _delta_rule(delta: DeltaNet) -> list[Saved]:
    """What ``delta_rule`` keeps besides, all of it float32; a query head is there once for its value heads."""
    key, value, heads, size = delta.key_width, delta.value_width, delta.num_value_heads, delta.key_size
    parts = {
        "queries, keys and values": delta.conv_width,
        "queries and keys of length 1, and factors": 2 * key + 2 * delta.num_key_heads,
        "by chunk: queries and keys, as each product wants them": 6 * key,
        "by chunk: values": value,
        "by chunk: products of keys, and of queries with keys": 2 * delta.num_key_heads * CHUNK_TOKENS,
        "by chunk: decays, with strengths, system, what is read within a chunk": 4 * heads * CHUNK_TOKENS,
        "by chunk: solutions": value + heads * size,
        "by chunk: factors of tokens": 6 * heads,
        "chunk after chunk: corrections, what makes them, queries, keys": value + 3 * heads * size,
        "chunk after chunk: states": delta.state_size / CHUNK_TOKENS,
    }
    places = Saved("places of tokens", 1, INDEX_BYTES, "whole")
    return [places, *(Saved(what, width, FLOAT32_BYTES, "tensor") for what, width in parts.items())]


def work_of_delta_rule(delta: DeltaNet) -> int:
    """Float32 elements per token, over all ranks, that are there in a forward pass before the last chunk is done.

    Queries and keys as chunks multiply them, decays, the system, what is read within a chunk, values, solutions, and
    outputs twice as they are put together.
    """
    heads = delta.num_value_heads
    return heads * (3 * delta.key_size + 3 * CHUNK_TOKENS) + 4 * delta.value_width


def _latent_attention(
    shape: ModelShape, kernels: Kernels, weight_bytes: int, recompute: Recompute
) -> tuple[Saved, ...]:
    """Of queries, keys and values only what attention reads is kept: the projections behind them keep latents."""
    latents = shape.latents
    assert latents is not None
    rank = latents.key_value_rank
    # torch's kernels take values that are filled up to the width of keys, and give such an output
    padded = kernels == "torch" and recompute != "selective"
    saved = [
        *_norm("input norm", shape.hidden_size, 1, weight_bytes, "sequence"),
        Saved("input of the projections to latents", shape.hidden_size, weight_bytes, "sequence"),
        *_norm("latent norm", rank, 1, weight_bytes, "sequence"),
        # of whose tensor the norm's input is a part
        Saved("rotated key, beside the latent", latents.rotated_size, weight_bytes, "sequence"),
        Saved("latent, normalised", rank, weight_bytes, "sequence"),
        Saved("queries", shape.query_width, weight_bytes, "tensor"),
        Saved("keys", shape.key_value_width, weight_bytes, "tensor"),
        Saved("values", shape.key_value_width if padded else shape.value_width, weight_bytes, "tensor"),
        Saved("input of the output projection", shape.output_width, weight_bytes, "tensor"),
    ]
    if latents.query_rank is not None:
        saved += _norm("query latent norm", latents.query_rank, 1, weight_bytes, "sequence")
        saved.append(Saved("query latent, normalised", latents.query_rank, weight_bytes, "sequence"))
    if kernels == "torch":
        saved.append(Saved("rotary factors", 2 * latents.rotated_size, weight_bytes, "whole"))
    if recompute != "selective":
        saved.append(Saved("attention: log-sum-exp", shape.num_heads, FLOAT32_BYTES, "tensor"))
        if kernels == "torch":
            saved.append(Saved("attention: output as wide as keys", shape.query_width, weight_bytes, "tensor"))
    return tuple(saved)


def _mlp(shape: ModelShape, kernels: Kernels, weight_bytes: int) -> tuple[Saved, ...]:
    return (
        *_layer_norms(shape, ("MLP norm", "norm behind the MLP"), weight_bytes),
        Saved("input of gate and up", shape.hidden_size, weight_bytes, "sequence"),
        *_gated(shape.ffn_size, kernels, weight_bytes, "tensor"),
    )


def _gated(width: float, kernels: Kernels, weight_bytes: int, split: Literal["tensor", "expert"]) -> list[Saved]:
    """Tensors that a gated MLP keeps besides its input; the input of ``down`` is among them."""
    saved = [Saved("gate and up", 2 * width, weight_bytes, split)]
    if kernels == "torch":
        saved += [
            Saved("activated gate", width, weight_bytes, split),
            Saved("up, a copy", width, weight_bytes, split),
        ]
    return [*saved, Saved("input of down", width, weight_bytes, split)]


def _expert_input(shape: ModelShape, weight_bytes: int) -> tuple[Saved, ...]:
    """The norm before router and experts, and what they read."""
    return (
        *_norm("MLP norm", shape.hidden_size, 1, weight_bytes, "sequence"),
        Saved("input of router and shared expert", shape.hidden_size, weight_bytes, "sequence"),
    )


def _experts(shape: ModelShape, kernels: Kernels, weight_bytes: int) -> tuple[Saved, ...]:
    """Router, dispatch, experts and the shared expert; every token has ``experts_per_token`` copies."""
    assert shape.experts is not None
    experts, hidden = shape.experts, shape.hidden_size
    copies = experts.experts_per_token
    saved = [
        *_routing(experts, kernels),
        Saved("input of gate and up, dispatched", copies * hidden, weight_bytes, "gathered"),
        Saved("weights of the copies", copies, FLOAT32_BYTES, "gathered"),
        *_gated(copies * experts.ffn_size, kernels, weight_bytes, "expert"),
    ]
    if kernels == "torch":
        saved.append(Saved("gate times up, before it is weighted", copies * experts.ffn_size, weight_bytes, "expert"))
    else:
        saved.append(Saved("order of the copies by expert", copies, INDEX_BYTES // 2, "gathered"))
    if experts.shared_ffn_size:
        saved += _gated(experts.shared_ffn_size, kernels, weight_bytes, "tensor")
    if experts.has_shared_gate:
        saved.append(Saved("output of the shared expert, and its gate", hidden + 1, weight_bytes, "sequence"))
    return tuple(saved)


def _routing(experts: Experts, kernels: Kernels) -> list[Saved]:
    """Tensors that routing keeps: float32 scores, the chosen experts' indices and weights, the order of the copies."""
    copies, num = experts.experts_per_token, experts.num_experts
    saved = [Saved("chosen experts", copies, INDEX_BYTES, "sequence")]
    if experts.score == "sigmoid":
        saved.append(
            Saved("scores, those of the chosen experts and their sum", num + copies + 1, FLOAT32_BYTES, "sequence")
        )
    else:
        saved.append(Saved("weights of the chosen experts", copies, FLOAT32_BYTES, "sequence"))
    if kernels == "te":
        # the fused permutation keeps one table for both directions: positions and experts of a token's copies
        return [*saved, Saved("permutation", 2 * num + 1, INDEX_BYTES // 2, "sequence")]
    return [
        *saved,
        Saved("mask of the chosen experts", num, 1, "sequence"),
        Saved("weights of all experts", num, FLOAT32_BYTES, "sequence"),
        Saved("permutation", copies, INDEX_BYTES, "sequence"),
    ]


def in_flight(layout: Layout, stage: int, num_micro_batches: int) -> int:
    """Chunks of layers whose activations a stage holds at the peak of Megatron's schedule.

    One forward, one backward: stage ``i`` of ``p`` has run ``p - i - 1`` micro-batches ahead, and one more is in work.
    Interleaved with ``v`` chunks: ``2 (p - i - 1) + (v - 1) p`` chunks ahead, and one in work.
    """
    ahead = layout.pipeline - stage - 1
    if layout.virtual > 1:
        ahead = 2 * ahead + (layout.virtual - 1) * layout.pipeline
    return min(ahead + 1, num_micro_batches * layout.virtual)
