"""exp and log from IEEE additions, multiplications and divisions only.

The vendors' vectorised exp and log may differ in the last bit between the body and the tail of a vector, so an
element's result can depend on where in a tensor it stands. These do not, which keeps geometric means bit for bit the
same however responses are dealt. Slower than the vendors'; used for the geometric variants only.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import power_of_two
from gtpo_megatron.algorithms.scratch import Scratch

LARGEST_LOG = 700.0
"""Logs of what is compared are smaller; ``portable_exp`` takes no more."""

_LN2_HIGH = 6.93147180369123816490e-01
"""The first 33 bits of ln 2: its product with an exponent is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_FRACTION_BITS = 52
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
"""sqrt(1/2) as the integer that its float64 is stored as."""
_ATANH = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
"""``2 atanh(s) = s (2 + c1 s^2 + c2 s^4 + ...)`` for ``|s| <= 0.1716``, best in the maximum norm: off by 2 ** -58 of s
(the coefficients of fdlibm's ``log``)."""
_PIECE = 1 << 16
"""Elements at a time: few enough for the cache, enough to hide the cost of a call."""
_TAYLOR_TERMS = 14
"""exp series at |r| <= 0.347: the first omitted term is below 1e-19."""


def portable_log(values: Tensor) -> Tensor:
    """Natural logarithm; within 2e-16 absolutely plus 4e-16 relatively.

    ``log v = e ln 2 + 2 atanh((m - 1) / (m + 1))`` with ``v = m 2^e``, ``sqrt(1/2) <= m < sqrt 2``.

    Args:
        values: float64, positive, finite and not subnormal; contiguous.

    Returns:
        float64, same shape; finite nonsense where ``values`` are zero.
    """
    result = torch.empty_like(values)
    _by_piece(_log_of_piece, values, result)
    return result


def portable_exp(values: Tensor) -> Tensor:
    """Exponential; within 1e-15 relatively for ``|values| <= 700``.

    ``exp v = 2^k exp(r)`` with ``r = v - k ln 2``, ``|r| <= ln(2) / 2``.

    Args:
        values: float64; clamped to [-700, 700]; contiguous.

    Returns:
        float64, same shape.
    """
    result = torch.empty_like(values)
    _by_piece(_exp_of_piece, values, result)
    return result


def _by_piece(function: Callable[[Tensor, Tensor, Scratch], None], values: Tensor, result: Tensor) -> None:
    """Applies ``function`` to pieces whose temporaries stay in cache: a series is dozens of passes."""
    flat, out, scratch = values.view(-1), result.view(-1), Scratch(values.device)
    size = _PIECE if values.device.type == "cpu" else max(1, len(flat))
    for start in range(0, len(flat), size):
        function(flat[start : start + size], out[start : start + size], scratch)


def _log_of_piece(values: Tensor, result: Tensor, scratch: Scratch) -> None:
    shape = tuple(values.shape)
    stored = values.view(torch.int64)
    exponent = torch.sub(stored, _SQRT_HALF_BITS, out=scratch.take("exponent", shape, torch.int64))
    exponent.bitwise_right_shift_(_FRACTION_BITS)
    bits = torch.bitwise_left_shift(exponent, _FRACTION_BITS, out=scratch.take("bits", shape, torch.int64))
    mantissa = torch.sub(stored, bits, out=bits).view(torch.float64)
    ratio = torch.sub(mantissa, 1.0, out=scratch.take("ratio", shape, torch.float64))
    ratio.div_(mantissa.add_(1.0))
    square = torch.mul(ratio, ratio, out=mantissa)
    torch.mul(square, _ATANH[-1], out=result)
    for coefficient in reversed(_ATANH[:-1]):
        result.add_(coefficient).mul_(square)
    result.add_(2.0).mul_(ratio)
    scaled = square.copy_(exponent)
    result.add_(torch.mul(scaled, _LN2_LOW, out=ratio)).add_(scaled.mul_(_LN2_HIGH))


def _exp_of_piece(values: Tensor, result: Tensor, scratch: Scratch) -> None:
    shape = tuple(values.shape)
    rest = torch.clamp(values, -LARGEST_LOG, LARGEST_LOG, out=scratch.take("rest", shape, torch.float64))
    steps = torch.mul(rest, 1 / math.log(2), out=scratch.take("steps", shape, torch.float64)).round_()
    product = scratch.take("product", shape, torch.float64)
    rest.sub_(torch.mul(steps, _LN2_HIGH, out=product)).sub_(torch.mul(steps, _LN2_LOW, out=product))
    result.fill_(1 / math.factorial(_TAYLOR_TERMS))
    for k in range(_TAYLOR_TERMS - 1, -1, -1):
        result.mul_(rest).add_(1 / math.factorial(k))
    result.mul_(power_of_two(steps))
