"""Matrix products, RMSNorm and rotary embeddings; float32 inside, the kernels' dtypes outside."""

from typing import Any

import torch
from torch import Tensor

DTYPES = {2: torch.float32, 3: torch.float16, 4: torch.bfloat16}
"""By the numbers of ``DType``."""


def generic_gemm(
    a: Tensor,
    is_a_transposed: bool,
    b: Tensor,
    is_b_transposed: bool,
    out: Tensor | None,
    quantizer: object,
    out_dtype: int | None,
    bias: Tensor | None,
    bias_dtype: int,
    gelu: bool,
    gelu_input: Tensor | None,
    is_backward: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulates: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """``op(b) @ op(a)``: cuBLAS counts columns first, so the second operand is torch's left one.

    Args:
        a: ``[n, k]`` if transposed, as weights in forward; else ``[k, n]``.
        is_a_transposed: see above.
        b: ``[..., k]``, or ``[k, m]`` if transposed; leading axes are one.
        is_b_transposed: as weights' gradients have it.
        out: where the result goes; a main gradient in float32, for instance.
        quantizer: None; float8 is not answered.
        out_dtype: of a new result, by ``DType``; None: of ``a``.
        bias: ``[n]``, added; in backward any tensor: its gradient is asked for.
        bias_dtype: not read.
        gelu: False.
        gelu_input: None.
        is_backward: see ``bias``.
        workspace: not read.
        workspace_size: not read.
        accumulates: ``out`` keeps what it has.
        use_split_accumulator: float8 only.
        **overlap: of communication; none, with factors 1 and 0 or 1.

    Returns:
        ``[..., n]`` and the bias' gradient or None.
    """
    del bias_dtype, gelu_input, workspace, workspace_size, use_split_accumulator
    assert quantizer is None
    assert not gelu
    assert overlap["comm_overlap"] is None
    assert overlap["alpha"] == 1.0
    right = a.reshape(-1, a.shape[-1]).float()
    left = b.reshape(-1, b.shape[-1]).float()
    product = (left.t() if is_b_transposed else left) @ (right.t() if is_a_transposed else right)
    bias_grad = None
    if bias is not None and bias.numel():
        if is_backward:
            bias_grad = left.sum(0).to(bias.dtype)
        else:
            product = product + bias.float()
    if not is_b_transposed:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if out is None:
        return product.to(a.dtype if out_dtype is None else DTYPES[int(out_dtype)]), bias_grad, None, None
    product = product.reshape(out.shape)
    out.copy_(out.float() + product if accumulates else product)
    return out, bias_grad, None, None


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: object,
    out_dtype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: ``[p, H]``.
        weight: ``[H]``, or its distance to 1 if ``zero_centered_gamma``.
        eps: see above.
        out: where the result goes, or None.
        quantizer: None.
        out_dtype: of a new result, by ``DType``.
        sm_margin: not read.
        zero_centered_gamma: see ``weight``.

    Returns:
        ``[p, H]``, None, and ``[p]`` float32, the inverse root.
    """
    del sm_margin
    assert quantizer is None
    inverse_root = torch.rsqrt(x.float().square().mean(-1) + eps)
    scale = weight.float() + (1.0 if zero_centered_gamma else 0.0)
    normed = (x.float() * inverse_root[:, None] * scale).to(DTYPES[int(out_dtype)])
    return (normed if out is None else out.copy_(normed)), None, inverse_root


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse_root: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Of ``x`` and ``weight``; arguments as in ``rmsnorm_fwd``."""
    del sm_margin
    normed = x.float() * inverse_root[:, None]
    grad = grad.reshape(x.shape).float()
    grad_normed = grad * (weight.float() + (1.0 if zero_centered_gamma else 0.0))
    grad_x = inverse_root[:, None] * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def fused_rope_forward(
    x: Tensor,
    frequencies: Tensor,
    start_positions: None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotates the queries or keys of packed sequences by their positions.

    Args:
        x: ``[p, heads, head size]``, of the tokens that this context-parallel rank holds.
        frequencies: ``[positions, 1, 1, d]`` float32, ``d <= head size``, radians.
        start_positions: None.
        qkv_format: ``thd``.
        interleaved: False: element ``i`` is paired with ``i + d / 2``.
        cu_seqlens: of whole sequences.
        cp_size: ranks that share each.
        cp_rank: of this one: it holds chunk ``cp_rank`` and chunk ``2 cp_size - 1 - cp_rank`` of ``2 cp_size``.

    Returns:
        As ``x``.
    """
    return _rotate(x, frequencies, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, sign=1.0)


def fused_rope_backward(
    grad: Tensor,
    frequencies: Tensor,
    start_positions: None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The gradient is rotated back."""
    return _rotate(grad, frequencies, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, sign=-1.0)


def _rotate(
    x: Tensor,
    frequencies: Tensor,
    start_positions: None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor,
    cp_size: int,
    cp_rank: int,
    *,
    sign: float,
) -> Tensor:
    assert start_positions is None
    assert qkv_format.name == "NVTE_THD"
    assert not interleaved
    positions = []
    for length in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        whole = torch.arange(length)
        if cp_size > 1:
            chunks = whole.chunk(2 * cp_size)
            whole = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
        positions.append(whole)
    angles = frequencies[torch.cat(positions), 0]  # [p, 1, d]
    size = angles.shape[-1]
    rotated, kept = x[..., :size].float(), x[..., size:].float()
    turned = torch.cat([-rotated[..., size // 2 :], rotated[..., : size // 2]], dim=-1)
    return torch.cat([rotated * angles.cos() + sign * turned * angles.sin(), kept], dim=-1).to(x.dtype)
