"""RMSNorm and rotation on a CPU, a tile of tokens at a time.

torch computes both in nine passes and more, of which every one reads and writes all tokens: what lies between two of
them has left the cache. Here all passes are made over a tile that stays in it, and backward keeps inputs only.
``benchmarks/cpu_products.py`` compares both.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 17
"""Of a tile, for each of torch's threads: half a megabyte of float32, what a core's second cache holds."""


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``y = w x r``, with ``r = (mean(x^2) + eps)^(-1/2)`` over the last dimension (arXiv 1910.07467, Eq. 4).

    Args:
        hidden: ``[..., H]`` float32 or bfloat16.
        weight: ``[H]``, of either.
        eps: what keeps ``r`` finite.

    Returns:
        As ``hidden``.
    """
    normed: Tensor = _RMSNorm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def rotating(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's ``_apply_rotary_pos_emb_bshd`` by tiles; other pairs than those of two halves are rotated as before.

    Args:
        otherwise: the function itself. Versions of Megatron have other switches, and a factor ``mscale``.
    """
    signature = inspect.signature(otherwise)

    @functools.wraps(otherwise)
    def rotate(heads: Tensor, angles: Tensor, *options: Any, **named: Any) -> Tensor:
        given = signature.bind(heads, angles, *options, **named).arguments
        factor, switches = given.get("mscale", 1.0), [name for name in list(given)[2:] if name != "mscale"]
        if any(given[name] for name in switches) or len(angles) != len(heads):
            return otherwise(heads, angles, *options, **named)
        half = angles[..., : angles.shape[-1] // 2]  # Megatron has each angle twice
        rotated: Tensor = _Rotation.apply(  # type: ignore[no-untyped-call]
            heads, (half.cos() * factor).to(heads.dtype), (half.sin() * factor).to(heads.dtype)
        )
        return rotated

    return rotate


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        inverse = torch.empty(hidden.shape[:-1], dtype=torch.float32).view(-1, 1)
        wide = weight.float()
        for x, y, r in _tiles(hidden.flatten(0, -2), normed.flatten(0, -2), inverse):
            wide_x = x.float()
            torch.mean(wide_x.square(), -1, keepdim=True, out=r)
            r.add_(eps).rsqrt_()
            torch.mul(wide_x * r, wide, out=y)
        ctx.save_for_backward(hidden, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """``dx = r (w g - x r mean(w g x r))`` and ``dw = sum over tokens of g x r``."""
        hidden, weight, inverse = ctx.saved_tensors
        wide, of_weight = weight.float(), torch.zeros(weight.shape, dtype=torch.float32)
        of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        tensors = (hidden.flatten(0, -2), gradient.flatten(0, -2), of_hidden.flatten(0, -2), inverse)
        for x, g, out, r in _tiles(*tensors):
            wide_g, unscaled = g.float(), x.float() * r
            products = wide_g * unscaled
            if ctx.needs_input_grad[1]:
                of_weight.addmv_(products.T, products.new_ones(len(products)))
            mean = torch.mv(products, wide).div_(len(wide))[:, None]
            torch.mul((wide_g * wide).addcmul_(unscaled, mean, value=-1), r, out=out)
        return of_hidden, of_weight.to(weight.dtype), None


class _Rotation(torch.autograd.Function):
    """``(a, b) -> (a cos - b sin, b cos + a sin)`` of the halves of a head's first elements; the rest stays."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[s, ..., heads, head_size]`` by ``[s, ..., 1, rotary_size / 2]``."""
    rotated, half = torch.empty_like(heads, memory_format=torch.contiguous_format), cos.shape[-1]
    for x, out, c, s in _tiles(heads, rotated, cos, sin):
        pair, turned = (part[..., : 2 * half].view(*part.shape[:-1], 2, half) for part in (x, out))
        torch.mul(pair, c[..., None, :], out=turned)
        turned[..., 0, :].addcmul_(pair[..., 1, :], s, value=-1)
        turned[..., 1, :].addcmul_(pair[..., 0, :], s)
        if 2 * half < x.shape[-1]:
            out[..., 2 * half :] = x[..., 2 * half :]
    return rotated


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of tensors together, as many at a time as the first one's fill a tile."""
    rows = max(1, TILE_ELEMENTS * torch.get_num_threads() // max(1, tensors[0][:1].numel()))
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
