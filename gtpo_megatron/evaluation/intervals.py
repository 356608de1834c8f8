"""Bootstrap intervals over problems, for one benchmark and for the mean over several; seeded, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gtpo_megatron.errors import DataError, ShapeError
from gtpo_megatron.evaluation.metrics import Floats, check_draws, finite_table

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
BLOCK_DRAWS = 1 << 16
"""Resampled values in memory at a time; the result does not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over problems and its bootstrap interval.

    Attributes:
        mean: over problems.
        low: lower end.
        high: upper end.
    """

    mean: float
    low: float
    high: float


def bootstrap_interval(
    per_problem: npt.ArrayLike, *, confidence: float = CONFIDENCE, num_bootstrap: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean over problems.

    Args:
        per_problem: ``[problems]``, for example ``c.mean(axis=1)`` or :func:`pass_at_k_per_problem`.
        confidence: between 0 and 1.
        num_bootstrap: number of resamples.
        seed: seed of the resamples.

    Raises:
        ShapeError, DataError: not a vector of at least one finite number, or ``confidence`` or ``num_bootstrap`` out of
            range.
    """
    try:
        values = np.asarray(per_problem, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"per_problem is ragged or not numeric ({error}); expected [problems]") from error
    if values.ndim != 1:
        raise ShapeError(f"per_problem has shape {values.shape}, expected [problems]")
    (interval,) = mean_intervals([values[:, None]], confidence=confidence, num_bootstrap=num_bootstrap, seed=seed)
    return interval


def mean_intervals(
    benchmarks: Sequence[npt.ArrayLike],
    *,
    confidence: float = CONFIDENCE,
    num_bootstrap: int = NUM_RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Unweighted means over several benchmarks with bootstrap intervals over problems.

    Every resample draws problems within each benchmark and averages the benchmarks' means.

    Args:
        benchmarks: ``[problems, figures]`` each; the number of problems may differ.
        confidence: between 0 and 1.
        num_bootstrap: number of resamples.
        seed: seed of the resamples, which are the same for every figure.

    Raises:
        ShapeError, DataError: no benchmark, not tables of finite numbers with equally many figures, or ``confidence``
            or ``num_bootstrap`` out of range.
    """
    tables = [finite_table(table) for table in benchmarks]
    num_figures = {table.shape[1] for table in tables}
    if len(num_figures) != 1:
        raise ShapeError(f"benchmarks have {sorted(num_figures)} figures; expected at least one, and as many of each")
    if not 0.0 < confidence < 1.0:
        raise DataError(f"confidence={confidence}: must lie strictly between 0 and 1, for example 0.95")
    check_draws(num_bootstrap)
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(table, num_bootstrap, rng) for table in tables], axis=0)
    tail = (1.0 - confidence) / 2.0
    lows, highs = np.quantile(means, (tail, 1.0 - tail), axis=0)
    exact = np.mean([[column.mean() for column in table.T] for table in tables], axis=0)
    return [
        Interval(mean=float(mean), low=float(low), high=float(high))
        for mean, low, high in zip(exact, lows, highs, strict=True)
    ]


def _resampled_means(values: Floats, num_bootstrap: int, rng: np.random.Generator) -> Floats:
    """Means over problems drawn with replacement, ``[num_bootstrap, figures]``."""
    num = len(values)
    means = np.empty((num_bootstrap, values.shape[1]))
    block = max(1, BLOCK_DRAWS // num)  # limits memory
    for start in range(0, num_bootstrap, block):
        size = min(block, num_bootstrap - start)
        drawn = rng.integers(num, size=(size, num))
        for figure in range(values.shape[1]):
            means[start : start + size, figure] = values[:, figure][drawn].mean(axis=1)
    return means
