r"""Accuracy of several samples a problem: mean@k, pass@k, best@k, maj@k, and an interval around any of them.

``c`` is ``[problems, samples]``: 0/1 or rewards, one row a problem, every row equally long. Pure and in float64;
whatever draws at random takes a seed and is the same on every machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gtpo_megatron.errors import DataError, ShapeError

Floats = npt.NDArray[np.float64]
CONFIDENCE = 0.95
NUM_BOOTSTRAP = 1_000
BLOCK_DRAWS = 1 << 16
"""Resampled values in memory at a time; how many they are does not change the result."""


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


def mean_at_k(c: npt.ArrayLike) -> float:
    """Share of correct samples, averaged over problems: ``mean_p mean_s c[p, s]``, k being the number of samples.

    Of 0 and 1; rewards of another range give their mean, which is reported as a mean reward and not as mean@k.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of finite numbers.
    """
    return float(_checked(c).mean())


def pass_at_k(c: npt.ArrayLike, k: int) -> float:
    """Unbiased probability that at least one of k samples is right, averaged over problems.

    ``pass@k = mean_p [1 - C(n - s_p, k) / C(n, k)]`` with n samples of which s_p are right (arXiv 2107.03374, Eq. 1).
    Exact for k samples drawn **without** replacement; :func:`best_at_k` is its with-replacement kin and lies below it.

    Args:
        c: ``[problems, samples]`` of 0 and 1.
        k: samples a problem, between 1 and n.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of 0 and 1, or k does not lie in 1..n.
    """
    return float(pass_at_k_per_problem(c, k).mean())


def pass_at_k_per_problem(c: npt.ArrayLike, k: int) -> Floats:
    """The terms of :func:`pass_at_k`, ``[problems]`` float64."""
    values = _checked(c)
    if not np.isin(values, (0.0, 1.0)).all():
        raise DataError("pass@k needs every entry to be 0 or 1; use best_at_k for rewards, or compare with a threshold")
    num_samples = values.shape[1]
    _check_k(k, num_samples)
    wrong = num_samples - values.sum(axis=1)
    # C(wrong, k) / C(n, k) as a product, which neither overflows nor cancels; a factor is 0 once wrong < k.
    steps = np.arange(k, dtype=np.float64)
    none_right = np.prod(np.clip(wrong[:, None] - steps, 0.0, None) / (num_samples - steps), axis=1)
    return np.asarray(1.0 - none_right)


def best_at_k(c: npt.ArrayLike, k: int, *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int | None = None) -> float:
    """Expected greatest reward of k samples drawn **with** replacement from a problem's n, averaged over problems.

    ``best@k = mean_p sum_i x_(i) [(i/n)^k - ((i-1)/n)^k]`` over the sorted rewards ``x_(1) <= ... <= x_(n)``: the exact
    expectation of the bootstrap that verl and others draw. With a ``seed`` it is drawn instead, ``num_bootstrap``
    times, to repeat figures that were made so.

    Args:
        c: ``[problems, samples]`` of rewards.
        k: samples a draw; may exceed n.
        num_bootstrap: draws, used with a seed.
        seed: None for the exact expectation.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of finite numbers, or k or ``num_bootstrap`` < 1.
    """
    return float(best_at_k_per_problem(c, k, num_bootstrap=num_bootstrap, seed=seed).mean())


def best_at_k_per_problem(
    c: npt.ArrayLike, k: int, *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int | None = None
) -> Floats:
    """The terms of :func:`best_at_k`, ``[problems]`` float64."""
    values = _checked(c)
    _check_k(k, None)
    if seed is None:
        num_samples = values.shape[1]
        share = (np.arange(num_samples + 1, dtype=np.float64) / num_samples) ** k
        return np.asarray(np.sort(values, axis=1) @ np.diff(share))
    return _bootstrap_draws(values.shape, k, num_bootstrap, seed, lambda p, drawn: values[p][drawn].max(axis=1))


def maj_at_k(
    c: npt.ArrayLike,
    answers: Sequence[Sequence[str | None]],
    k: int,
    *,
    num_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = 0,
) -> float:
    """Reward of the commonest answer among k samples drawn with replacement (bootstrap), averaged over problems.

    Of answers equally common, the one drawn first wins. None means that a sample gave no answer: it is outvoted by
    any answer and scores 0 where nothing else was drawn. A draw scores the mean reward of the winning answer's samples
    in ``c``, so that equal answers that were graded apart do not depend on which came first.

    Args:
        c: ``[problems, samples]`` of 0/1 or rewards.
        answers: ``[problems][samples]`` final answers, compared as text; normalise them first.
        k: samples a draw; may exceed n.
        num_bootstrap: draws.
        seed: of the draws.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of finite numbers, ``answers`` has another shape, or
            k or ``num_bootstrap`` < 1.
    """
    return float(maj_at_k_per_problem(c, answers, k, num_bootstrap=num_bootstrap, seed=seed).mean())


def maj_at_k_per_problem(
    c: npt.ArrayLike,
    answers: Sequence[Sequence[str | None]],
    k: int,
    *,
    num_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = 0,
) -> Floats:
    """The terms of :func:`maj_at_k`, ``[problems]`` float64."""
    values = _checked(c)
    _check_k(k, None)
    shape = [len(row) for row in answers]
    if shape != [values.shape[1]] * values.shape[0]:
        raise ShapeError(f"answers has rows of {shape} entries, expected {values.shape[0]} rows of {values.shape[1]}")
    votes = [_Votes.of(values[p], answers[p]) for p in range(values.shape[0])]
    return _bootstrap_draws(values.shape, k, num_bootstrap, seed, lambda p, drawn: votes[p].winner(drawn))


def bootstrap_interval(
    per_problem: npt.ArrayLike, *, confidence: float = CONFIDENCE, num_bootstrap: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap over problems: the interval of their mean, were other problems drawn from the same source.

    Args:
        per_problem: ``[problems]``, for example ``c.mean(axis=1)`` or :func:`pass_at_k_per_problem`.
        confidence: between 0 and 1.
        num_bootstrap: resamples.
        seed: of the resamples.

    Raises:
        ShapeError, DataError: not a vector of at least one finite number, or ``confidence`` or ``num_bootstrap`` out of
            range.
    """
    values = np.asarray(per_problem, dtype=np.float64)
    if values.ndim != 1:
        raise ShapeError(f"per_problem has shape {values.shape}, expected [problems]")
    (interval,) = bootstrap_intervals(values[:, None], confidence=confidence, num_bootstrap=num_bootstrap, seed=seed)
    return interval


def bootstrap_intervals(
    per_problem: npt.ArrayLike, *, confidence: float = CONFIDENCE, num_bootstrap: int = 10_000, seed: int = 0
) -> list[Interval]:
    """:func:`bootstrap_interval` of several figures over the same problems, for the price of one.

    Args:
        per_problem: ``[problems, figures]``.
        confidence: between 0 and 1.
        num_bootstrap: resamples.
        seed: of the resamples, which are the same for every figure.

    Raises:
        ShapeError, DataError: not a table of finite numbers, or ``confidence`` or ``num_bootstrap`` out of range.
    """
    return mean_intervals([per_problem], confidence=confidence, num_bootstrap=num_bootstrap, seed=seed)


def mean_intervals(
    benchmarks: Sequence[npt.ArrayLike],
    *,
    confidence: float = CONFIDENCE,
    num_bootstrap: int = 10_000,
    seed: int = 0,
) -> list[Interval]:
    """Plain means over several benchmarks, each counting alike, with intervals: benchmarks are fixed, problems are not.

    Every resample draws each benchmark's problems anew, from its own, and averages the benchmarks' means.

    Args:
        benchmarks: ``[problems, figures]`` each; as many figures, and any number of problems.
        confidence: between 0 and 1.
        num_bootstrap: resamples.
        seed: of the resamples, which are the same for every figure.

    Raises:
        ShapeError, DataError: no benchmark, not tables of finite numbers with equally many figures, or ``confidence``
            or ``num_bootstrap`` out of range.
    """
    tables = [_checked(table) for table in benchmarks]
    num_figures = {table.shape[1] for table in tables}
    if len(num_figures) != 1:
        raise ShapeError(f"benchmarks have {sorted(num_figures)} figures; expected at least one, and as many of each")
    if not 0.0 < confidence < 1.0:
        raise DataError(f"confidence={confidence}: must lie strictly between 0 and 1, for example 0.95")
    _check_draws(num_bootstrap)
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
    """Means over as many problems as there are, drawn with replacement, ``[num_bootstrap, figures]``."""
    num = len(values)
    means = np.empty((num_bootstrap, values.shape[1]))
    block = max(1, BLOCK_DRAWS // num)  # [num_bootstrap, problems] at once would be large
    for start in range(0, num_bootstrap, block):
        size = min(block, num_bootstrap - start)
        drawn = rng.integers(num, size=(size, num))
        for figure in range(values.shape[1]):
            means[start : start + size, figure] = values[:, figure][drawn].mean(axis=1)
    return means


@dataclass(frozen=True, kw_only=True, slots=True)
class _Votes:
    """One problem's samples as votes: ``labels [samples]`` number the answers (-1: none), ``rewards [answers]``."""

    labels: npt.NDArray[np.int64]
    rewards: Floats

    @classmethod
    def of(cls, rewards: Floats, answers: Sequence[str | None]) -> "_Votes":
        names = sorted({answer for answer in answers if answer is not None})
        index = {answer: label for label, answer in enumerate(names)}
        labels = np.array([-1 if answer is None else index[answer] for answer in answers], dtype=np.int64)
        return cls(labels=labels, rewards=np.array([rewards[labels == label].mean() for label in range(len(names))]))

    def winner(self, drawn: npt.NDArray[np.int64]) -> Floats:
        """The reward of the winner of each draw, ``[draws]``, for sample numbers ``drawn [draws, k]``."""
        if not len(self.rewards):
            return np.zeros(len(drawn))
        ballots = self.labels[drawn]
        num_draws, k = drawn.shape
        draws = np.arange(num_draws)
        counts = np.zeros((num_draws, len(self.rewards) + 1), dtype=np.int64)  # the last column: no answer
        first = np.full_like(counts, k)
        for position in reversed(range(k)):  # k small steps: [draws, k, answers] at once takes six times as long
            counts[draws, ballots[:, position]] += 1
            first[draws, ballots[:, position]] = position
        counts, first = counts[:, :-1], first[:, :-1]
        best = (counts * (k + 1) - first).argmax(axis=1)  # more votes first, then the earlier first vote
        rewards = self.rewards[best]
        return np.asarray(np.where(counts.max(axis=1) > 0, rewards, 0.0))


def _bootstrap_draws(
    shape: tuple[int, ...],
    k: int,
    num_bootstrap: int,
    seed: int,
    score: Callable[[int, npt.NDArray[np.int64]], Floats],
) -> Floats:
    """Mean score over draws of k sample numbers with replacement, by problem; ``shape`` is [problems, samples]."""
    _check_draws(num_bootstrap)
    rng = np.random.default_rng(seed)
    means = [score(p, rng.integers(shape[1], size=(num_bootstrap, k))).mean() for p in range(shape[0])]
    return np.asarray(means, dtype=np.float64)


def _checked(c: Any) -> Floats:
    """``c`` as float64 ``[problems, samples]``, both at least 1, all finite."""
    try:
        values = np.asarray(c, dtype=np.float64)
    except ValueError as error:
        raise ShapeError(
            f"c is ragged or not numeric ({error}); expected [problems, samples], all rows equally long"
        ) from error
    if values.ndim != 2 or 0 in values.shape:
        raise ShapeError(f"c has shape {values.shape}, expected [problems, samples] with at least one of each")
    if not np.isfinite(values).all():
        raise DataError("c holds NaN or infinity; leave failed samples out, or say what they count as")
    return values


def _check_k(k: int, greatest: int | None) -> None:
    if k < 1 or (greatest is not None and k > greatest):
        raise DataError(f"k={k}: must be at least 1" + (f" and at most the {greatest} samples" if greatest else ""))


def _check_draws(num_bootstrap: int) -> None:
    if num_bootstrap < 1:
        raise DataError(f"num_bootstrap={num_bootstrap}: must be at least 1")
