"""Fused attention of packed sequences, with the statistics from which backward and context parallelism go on."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASKS = {"NVTE_PADDING_MASK": False, "NVTE_PADDING_CAUSAL_MASK": True}
"""Whether a position sees no later one, by the masks that packed sequences have."""


@dataclass(frozen=True)
class _Packed:
    """Where the sequences of queries and of keys lie, and how they are attended to."""

    query_starts: list[int]
    query_lengths: list[int]
    key_starts: list[int]
    key_lengths: list[int]
    is_causal: bool
    scale: float
    before: int

    @classmethod
    def of(
        cls, lengths: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], mask: Any, scale: float, window: Any
    ) -> "_Packed":
        """From cumulative lengths of the tokens, and of the places that they have with padding between them."""
        (query, key), (query_places, key_places) = lengths, places
        return cls(
            query_starts=query_places[:-1].tolist(),
            query_lengths=(query[1:] - query[:-1]).tolist(),
            key_starts=key_places[:-1].tolist(),
            key_lengths=(key[1:] - key[:-1]).tolist(),
            is_causal=MASKS[mask.name],
            scale=scale,
            before=window[0],
        )

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Of queries and of keys, a sequence each."""
        for query_start, query_length, key_start, key_length in zip(
            self.query_starts, self.query_lengths, self.key_starts, self.key_lengths, strict=True
        ):
            yield slice(query_start, query_start + query_length), slice(key_start, key_start + key_length)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """``[heads, q, k]`` float32 of one sequence; ``-inf`` where a query does not see a key."""
        scores = self.scale * torch.einsum("qhd,khd->hqk", q, k)
        if self.is_causal:  # from the first query and the first key on, however many there are
            is_later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(is_later, float("-inf"))
        if self.before >= 0:
            is_too_early = torch.ones(len(q), len(k), dtype=torch.bool).tril(-self.before - 1)
            scores = scores.masked_fill(is_too_early, float("-inf"))
        return scores


def _for_every_head(x: Tensor, num_heads: int) -> Tensor:
    """``[k, groups, d]`` to ``[k, heads, d]`` float32; neighbouring heads share a group."""
    return x.float().repeat_interleave(num_heads // x.shape[1], dim=1)


def fused_attn_fwd(*arguments: Any) -> list[Tensor]:
    """Attention within each of packed sequences.

    Args:
        *arguments: those of the C++ function of this name (version 2.20.2), in its order. Read are the mask, the
            scale, the window, queries ``[t, heads, d]``, keys and values ``[s, groups, d]`` and cumulative lengths
            without and with padding, and sinks ``[1, heads, 1, 1]`` float32, whose exponentials are in the softmax's
            sums. Dropout, biases and float8 are refused.

    Returns:
        ``[t, heads, d]`` in the queries' dtype, zero between sequences; the logarithms of the softmax's sums
        ``[t, heads, 1]`` float32; a random state; the sinks, if there are any.
    """
    (_, _, _, scale, dropout, _, layout, out_format, _, bias, mask, softmax, window, bottom_right, *rest) = arguments
    cu_q, cu_kv, q, k, v, _, cu_q_padded, cu_kv_padded, *options = rest
    _refuse_others(layout, out_format, bias, softmax, window, mask, dropout=dropout, bottom_right=bottom_right)
    assert all(option is None for option in options[:5])  # page tables, quantizers, bias
    sinks = options[5]
    assert (sinks is not None) == (softmax.name == "NVTE_LEARNABLE_SOFTMAX")
    packed = _Packed.of((cu_q, cu_kv), (cu_q_padded, cu_kv_padded), mask, scale, window)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float32)
    sums = torch.zeros(*q.shape[:2], dtype=torch.float32)
    for queries, keys in packed.slices():
        heads = q.shape[1]
        scores = packed.scores(q[queries].float(), _for_every_head(k[keys], heads))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(heads, 1, 1).expand(-1, len(q[queries]), 1)], -1)
        sums[queries] = scores.logsumexp(-1).t()
        probs = scores.softmax(-1)[..., : len(k[keys])]
        out[queries] = torch.einsum("hqk,khd->qhd", probs, _for_every_head(v[keys], heads))
    kept = [] if sinks is None else [sinks]
    return [out.to(q.dtype), sums[..., None], torch.zeros(2, dtype=torch.int64), *kept]


def fused_attn_bwd(*arguments: Any) -> list[Tensor | None]:
    """The gradients of ``fused_attn_fwd``, from its result and its statistics as a kernel takes them.

    Under context parallelism the keys are some of those that the result and the statistics are of.

    Args:
        *arguments: those of the C++ function of this name, in its order.

    Returns:
        Of queries, keys and values, in their dtypes; None, since biases are refused; of sinks, None without.
    """
    (_, _, scale, dropout, _, layout, out_format, _, _, _, _, bias, mask, softmax, window, bottom_right, *rest) = (
        arguments
    )
    _, cu_q, cu_kv, q, k, v, out, grad_out, _, saved, cu_q_padded, cu_kv_padded, *quantizers = rest
    _refuse_others(layout, out_format, bias, softmax, window, mask, dropout=dropout, bottom_right=bottom_right)
    assert all(quantizer is None for quantizer in quantizers[:3])
    sums = saved[0][..., 0]
    assert sums.shape == q.shape[:2], f"statistics {tuple(sums.shape)} of queries {tuple(q.shape)}"
    packed = _Packed.of((cu_q, cu_kv), (cu_q_padded, cu_kv_padded), mask, scale, window)
    heads, groups = q.shape[1], k.shape[1]
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    sinks = saved[2].float() if softmax.name == "NVTE_LEARNABLE_SOFTMAX" else None
    grad_sinks = None if sinks is None else torch.zeros_like(sinks)
    for queries, keys in packed.slices():
        query, grad = q[queries].float(), grad_out.reshape(out.shape)[queries].float()
        key, value = _for_every_head(k[keys], heads), _for_every_head(v[keys], heads)
        probs = torch.exp(packed.scores(query, key) - sums[queries].t()[..., None])
        to_itself = (grad * out[queries].float()).sum(-1).t()[..., None]
        if sinks is not None:
            of_sinks = torch.exp(sinks.view(heads, 1) - sums[queries].t())
            grad_sinks -= (of_sinks * to_itself[..., 0]).sum(-1).view_as(sinks)
        grad_scores = scale * probs * (torch.einsum("qhd,khd->hqk", grad, value) - to_itself)
        grad_q[queries] = torch.einsum("hqk,khd->qhd", grad_scores, key)
        grad_k[keys] = _sum_over_group(torch.einsum("hqk,qhd->khd", grad_scores, query), groups)
        grad_v[keys] = _sum_over_group(torch.einsum("hqk,qhd->khd", probs, grad), groups)
    return [grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, grad_sinks]


def _sum_over_group(x: Tensor, num_groups: int) -> Tensor:
    return x.unflatten(1, (num_groups, -1)).sum(2)


def _refuse_others(
    layout: Any, out_format: Any, bias: Any, softmax: Any, window: Any, mask: Any, *, dropout: float, bottom_right: bool
) -> None:
    names = tuple(value.name for value in (layout, out_format, bias))
    assert names == ("NVTE_THD_THD_THD", "NVTE_THD", "NVTE_NO_BIAS"), names
    assert softmax.name in ("NVTE_VANILLA_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"), softmax.name
    assert mask.name in MASKS, mask.name
    assert tuple(window) == (-1, -1) or window[1] == 0, window  # so many before, none behind
    assert dropout == 0.0
    assert not bottom_right


def bounds(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Start and end of every sequence."""
    return list(itertools.pairwise(cu_seqlens.tolist()))
