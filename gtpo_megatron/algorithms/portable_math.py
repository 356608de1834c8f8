"""exp and log from IEEE additions, multiplications and divisions only.

The vendors' vectorised exp and log may differ in the last bit between the body and the tail of a vector, so an
element's result can depend on where in a tensor it stands. These do not, which keeps geometric means bit for bit the
same however responses are dealt. Slower than the vendors'; used for the geometric variants only.
"""

import math

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import power_of_two

_LN2_HIGH = 6.93147180369123816490e-01
"""The first 33 bits of ln 2: its product with an exponent is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_SERIES_TERMS = 12
"""atanh series at |s| <= 0.172: the first omitted term is below 1e-19."""
_TAYLOR_TERMS = 15
"""exp series at |r| <= 0.347: the first omitted term is below 1e-20."""


def portable_log(values: Tensor) -> Tensor:
    """Natural logarithm; within 2e-16 absolutely plus 4e-16 relatively.

    ``log v = e ln 2 + 2 atanh((m - 1) / (m + 1))`` with ``v = m 2^e``, ``sqrt(1/2) <= m < sqrt 2``.

    Args:
        values: float64, positive and finite.

    Returns:
        float64, same shape.
    """
    mantissa, exponent = torch.frexp(values)
    is_small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_small, mantissa * 2, mantissa)
    exponent = (exponent - is_small.to(exponent.dtype)).to(torch.float64)
    ratio = (mantissa - 1).div_(mantissa.add_(1))
    square = ratio * ratio
    series = torch.full_like(values, 1.0 / (2 * _SERIES_TERMS + 1))
    for k in range(_SERIES_TERMS - 1, -1, -1):
        series.mul_(square).add_(1.0 / (2 * k + 1))
    return (exponent * _LN2_LOW).add_(series.mul_(ratio.mul_(2))).add_(exponent.mul_(_LN2_HIGH))


def portable_exp(values: Tensor) -> Tensor:
    """Exponential; within 1e-15 relatively for ``|values| <= 700``.

    ``exp v = 2^k exp(r)`` with ``r = v - k ln 2``, ``|r| <= ln(2) / 2``.

    Args:
        values: float64; clamped to [-700, 700].

    Returns:
        float64, same shape.
    """
    values = values.clamp(-700.0, 700.0)
    steps = torch.round(values * (1 / math.log(2)))
    rest = values - steps * _LN2_HIGH
    rest = rest - steps * _LN2_LOW
    series = torch.ones_like(values)
    for k in range(_TAYLOR_TERMS, 0, -1):
        series.mul_(rest).div_(k).add_(1)
    return series.mul_(power_of_two(steps))
