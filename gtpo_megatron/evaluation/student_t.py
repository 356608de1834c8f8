"""Student's t distribution: distribution function and quantile, in the standard library alone."""

import math

from gtpo_megatron.errors import DataError

_TINY = 1e-300
_MAX_TERMS = 500
_PRECISION = 1e-15


def cdf(t: float, degrees: float) -> float:
    """Probability of a value of at most ``t``.

    ``1 - I_x(degrees / 2, 1 / 2) / 2`` for ``t >= 0``, with ``x = degrees / (degrees + t^2)`` and the regularised
    incomplete beta function ``I``.

    Args:
        t: any number, infinities included.
        degrees: of freedom, above 0.

    Raises:
        DataError: ``degrees`` is not above 0, or ``t`` is no number.
    """
    _check_degrees(degrees)
    if math.isnan(t):
        raise DataError("t is not a number")
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    tail = _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def quantile(probability: float, degrees: float) -> float:
    """The value that the distribution stays below with ``probability``, by bisection.

    Args:
        probability: between 0 and 1, both excluded.
        degrees: of freedom, above 0.

    Raises:
        DataError: an argument out of range.
    """
    _check_degrees(degrees)
    if not 0 < probability < 1:
        raise DataError(f"probability={probability}: must lie between 0 and 1")
    if probability < 0.5:
        return -quantile(1 - probability, degrees)
    high = 1.0
    while cdf(high, degrees) < probability:
        high *= 2
    low = 0.0
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _check_degrees(degrees: float) -> None:
    if not degrees > 0:
        raise DataError(f"degrees={degrees}: must be above 0")


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised; by its continued fraction, which converges fast on the side of the mean that ``x`` is moved to."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1 - math.exp(log_front) * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, evaluated from the front (modified Lentz)."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MAX_TERMS):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + factor * d)
            c = _away_from_zero(1 + factor / c)
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
