"""Statistics of paired results of two methods over a few seeds.

Both methods ran with the same seeds, so effects of a seed on both cancel in the difference. All functions are pure;
those that draw at random take a seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from gtpo_megatron.evaluation.intervals import CONFIDENCE, Interval, bootstrap_interval

try:
    # Student's t: distribution function and quantile; the noncentral one's; the quantile of chi squared
    from scipy.special import chdtri, nctdtr, stdtr, stdtrit
except ImportError as problem:
    raise ConfigError(
        f"a study's statistics need scipy, which cannot be imported ({problem}); install the extra: "
        "uv pip install 'gtpo-megatron[study]'"
    ) from problem

POWER = 0.8
MAX_EXACT_PAIRS = 20
"""Largest number of pairs for which all ``2^n`` signs are tried (8 MiB of sums); beyond it they are sampled."""
NUM_RANDOM_SIGNS = 20_000
_ROUNDING = 1e-12
"""Tolerance for sums of the same numbers in another order, relative to the size of the numbers."""
_NUM_HALVINGS = 50
"""Of an interval that a root lies in: to the last bits of a float."""
_FAR_SHIFT = 7.0
"""Noncentrality beyond which the tail on the other side of 0 has less than 2e-12; scipy's is NaN at some of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Comparison of a method with a baseline.

    Attributes:
        num_pairs: number of seeds that both have.
        difference: mean of method minus baseline, with its bootstrap interval over pairs, which is too narrow for few
            pairs.
        t_interval: Student's t interval of the same mean; infinite for one pair.
        p_t: two-sided p of the paired t test.
        p_sign_flip: two-sided p over all signs of the differences, without an assumption of normality; at least
            ``2 / 2^n``, 0.0625 for five pairs.
        smallest_detectable: the true difference that a paired t test at 5% finds with a probability of 80%, for the
            observed standard error; infinite for one pair.
    """

    num_pairs: int
    difference: Interval
    t_interval: tuple[float, float]
    p_t: float
    p_sign_flip: float
    smallest_detectable: float

    @property
    def has_scatter(self) -> bool:
        """False for one pair, or if all differences are equal: there is no t test."""
        return not math.isinf(self.t_interval[0])


def compare(method: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> PairedComparison:
    """Compares paired results, one per training seed.

    Args:
        method: one result per seed.
        baseline: results of the same seeds in the same order.
        seed: seed of the bootstrap, and of sampled signs.

    Raises:
        ShapeError: not equally many, or none.
        DataError: a result is not finite.
    """
    if len(method) != len(baseline) or not method:
        raise ShapeError(f"got {len(method)} and {len(baseline)} results, expected equally many and at least one")
    differences = [float(left) - float(right) for left, right in zip(method, baseline, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise DataError("a result is not finite; leave out seeds without a result")
    n, error = len(differences), standard_error(differences)
    return PairedComparison(
        num_pairs=n,
        difference=bootstrap_interval(differences, seed=seed),
        t_interval=t_interval(differences),
        p_t=paired_t_p(differences),
        p_sign_flip=sign_flip_p(differences, seed=seed),
        smallest_detectable=smallest_detectable(error, n),
    )


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95% interval of the mean; infinite for one value."""
    mean, error, n = fmean(values), standard_error(values), len(values)
    reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error if n > 1 else math.inf
    return mean - reach, mean + reach


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; infinite for one value, or for values that are equal up to rounding."""
    if len(values) < 2:
        return math.inf
    error = stdev(values) / math.sqrt(len(values))
    return error if error > _ROUNDING * abs(fmean(values)) else math.inf


def paired_t_p(differences: Sequence[float]) -> float:
    """Two-sided p of the t test that the mean difference is 0; 1 if the standard error is infinite."""
    mean, error = fmean(differences), standard_error(differences)
    if math.isinf(error) or mean == 0:
        return 1.0
    return 2 * float(stdtr(len(differences) - 1, -abs(mean) / error))


def sign_flip_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of the sign-flip test: how often random signs give a mean at least as far from 0.

    Exact up to ``MAX_EXACT_PAIRS`` pairs; beyond, from random signs including the observed ones, so that p is never 0.
    Means that differ by rounding are equally far from 0, also where the observed one is itself nothing but rounding.
    """
    values = np.asarray(differences, dtype=np.float64)
    observed = abs(float(values.sum())) - _ROUNDING * float(np.abs(values).sum())
    if len(values) <= MAX_EXACT_PAIRS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate((sums + value, sums - value))
        return float((np.abs(sums) >= observed).mean())
    drawn = np.random.default_rng(seed).choice((1.0, -1.0), size=(NUM_RANDOM_SIGNS, len(values)))
    return float((1 + int((np.abs(drawn @ values) >= observed).sum())) / (1 + NUM_RANDOM_SIGNS))


def smallest_detectable(error: float, num_pairs: int, *, power: float = POWER) -> float:
    """The true mean difference that a two-sided paired t test at 5% finds with probability ``power``.

    The inverse of :func:`paired_t_power`, which rises with the difference. The usual approximation
    ``(t_{0.975} + t_{power}) * standard error`` has a power of 73% for two pairs and 79% for five, where 80% is asked
    for.

    Args:
        error: standard error of the mean difference.
        num_pairs: number of pairs.
        power: above 0.05 and below 1.
    """
    if num_pairs < 2:
        return math.inf
    scatter = math.sqrt(num_pairs)  # so that differences are in standard errors
    low, high = 0.0, 1.0
    while paired_t_power(high, scatter, num_pairs) < power:
        low, high = high, 2 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if paired_t_power(middle, scatter, num_pairs) < power else (low, middle)
    return high * error


def paired_t_power(difference: float, scatter: float, num_pairs: int) -> float:
    """Probability that a two-sided paired t test at 5% finds a true difference.

    ``P(|T| > t_{0.975})`` for a noncentral t of ``n - 1`` degrees of freedom and noncentrality
    ``difference * sqrt(n) / scatter``.

    Args:
        difference: true mean difference.
        scatter: standard deviation of the differences of pairs, in the same unit.
        num_pairs: ``n``, at least 2.
    """
    degrees = num_pairs - 1
    limit = float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
    shift = abs(difference) * math.sqrt(num_pairs) / scatter
    below = float(nctdtr(degrees, shift, -limit)) if shift < _FAR_SHIFT else 0.0
    return below + 1 - float(nctdtr(degrees, shift, limit))


def scatter_limit(scatter: float, num_pairs: int) -> float:
    """Upper end of the two-sided 95% interval of a standard deviation that ``num_pairs`` normal values gave."""
    degrees = num_pairs - 1
    return scatter * math.sqrt(degrees / float(chdtri(degrees, (1 + CONFIDENCE) / 2)))


def shown_p(p: float) -> str:
    """Three digits; a p is never shown as 0."""
    return "<0.001" if p < 0.0005 else f"{p:.3f}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction for multiple tests.

    Returns:
        Corrected p values in the order given, at most 1 each.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    greatest = 0.0
    for rank, index in enumerate(order):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = greatest
    return corrected
