r"""Accuracy of several samples per problem: mean@k, pass@k, best@k, maj@k; intervals are in ``intervals.py``.

``c`` is ``[problems, samples]``: 0/1 or rewards, one row per problem. All functions are pure and use float64;
those that draw at random take a seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gtpo_megatron.errors import DataError, ShapeError

Floats = npt.NDArray[np.float64]
NUM_BOOTSTRAP = 1_000
"""Number of draws of k samples per problem."""


def mean_at_k(c: npt.ArrayLike) -> float:
    """Fraction of correct samples, averaged over problems: ``mean_p mean_s c[p, s]``, k being the number of samples.

    For rewards other than 0 and 1 it is the mean reward.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of finite numbers.
    """
    return float(finite_table(c).mean())


def pass_at_k(c: npt.ArrayLike, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct, averaged over problems.

    ``pass@k = mean_p [1 - C(n - s_p, k) / C(n, k)]`` with n samples, s_p of them correct (arXiv 2107.03374, Eq. 1).
    This draws k samples **without** replacement; :func:`best_at_k` draws with replacement and is lower.

    Args:
        c: ``[problems, samples]`` of 0 and 1.
        k: samples per problem, between 1 and n.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of 0 and 1, or k does not lie in 1..n.
    """
    return float(pass_at_k_per_problem(c, k).mean())


def pass_at_k_per_problem(c: npt.ArrayLike, k: int) -> Floats:
    """The terms of :func:`pass_at_k`, ``[problems]`` float64."""
    values = finite_table(c)
    if not np.isin(values, (0.0, 1.0)).all():
        raise DataError("pass@k needs every entry to be 0 or 1; use best_at_k for rewards, or compare with a threshold")
    num_samples = values.shape[1]
    _check_k(k, num_samples)
    incorrect = num_samples - values.sum(axis=1)
    # C(incorrect, k) / C(n, k) as a product, which neither overflows nor cancels; 0 if incorrect < k.
    steps = np.arange(k, dtype=np.float64)
    none_correct = np.prod(np.clip(incorrect[:, None] - steps, 0.0, None) / (num_samples - steps), axis=1)
    return np.asarray(1.0 - none_correct)


def best_at_k(c: npt.ArrayLike, k: int, *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int | None = None) -> float:
    """Expected highest reward of k samples drawn **with** replacement from a problem's n, averaged over problems.

    ``best@k = mean_p sum_i x_(i) [(i/n)^k - ((i-1)/n)^k]`` over the sorted rewards ``x_(1) <= ... <= x_(n)``: the exact
    expectation of the bootstrap of verl and others. With a ``seed`` it is drawn ``num_bootstrap`` times instead, to
    reproduce such figures.

    Args:
        c: ``[problems, samples]`` of rewards.
        k: samples per draw; may exceed n.
        num_bootstrap: number of draws, used with a seed.
        seed: None for the exact expectation.

    Raises:
        ShapeError, DataError: ``c`` is not ``[problems, samples]`` of finite numbers, or k or ``num_bootstrap`` < 1.
    """
    return float(best_at_k_per_problem(c, k, num_bootstrap=num_bootstrap, seed=seed).mean())


def best_at_k_per_problem(
    c: npt.ArrayLike, k: int, *, num_bootstrap: int = NUM_BOOTSTRAP, seed: int | None = None
) -> Floats:
    """The terms of :func:`best_at_k`, ``[problems]`` float64."""
    values = finite_table(c)
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
    """Reward of the most frequent answer among k samples drawn with replacement (bootstrap), averaged over problems.

    Of equally frequent answers the one drawn first wins. None means no answer: any answer wins over it, and a draw
    without answers scores 0. A draw scores the mean reward of all samples in ``c`` with the winning answer.

    Args:
        c: ``[problems, samples]`` of 0/1 or rewards.
        answers: ``[problems][samples]`` final answers, compared as text; normalise them first.
        k: samples per draw; may exceed n.
        num_bootstrap: number of draws.
        seed: seed of the draws.

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
    values = finite_table(c)
    _check_k(k, None)
    shape = [len(row) for row in answers]
    if shape != [values.shape[1]] * values.shape[0]:
        raise ShapeError(f"answers has rows of {shape} entries, expected {values.shape[0]} rows of {values.shape[1]}")
    votes = [_Votes.of(values[p], answers[p]) for p in range(values.shape[0])]
    return _bootstrap_draws(values.shape, k, num_bootstrap, seed, lambda p, drawn: votes[p].winner(drawn))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Votes:
    """Votes of one problem: ``labels [samples]``, the answer's index or -1, and ``rewards [answers]``."""

    labels: npt.NDArray[np.int64]
    rewards: Floats

    @classmethod
    def of(cls, rewards: Floats, answers: Sequence[str | None]) -> "_Votes":
        names = sorted({answer for answer in answers if answer is not None})
        index = {answer: label for label, answer in enumerate(names)}
        labels = np.array([-1 if answer is None else index[answer] for answer in answers], dtype=np.int64)
        return cls(labels=labels, rewards=np.array([rewards[labels == label].mean() for label in range(len(names))]))

    def winner(self, drawn: npt.NDArray[np.int64]) -> Floats:
        """The reward of the winner of each draw, ``[draws]``, for sample indices ``drawn [draws, k]``."""
        if not len(self.rewards):
            return np.zeros(len(drawn))
        ballots = self.labels[drawn]
        num_draws, k = drawn.shape
        draws = np.arange(num_draws)
        counts = np.zeros((num_draws, len(self.rewards) + 1), dtype=np.int64)  # the last column: no answer
        first = np.full_like(counts, k)
        for position in reversed(range(k)):  # six times as fast as [draws, k, answers] at once
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
    """Mean score per problem over draws of k sample indices with replacement; ``shape`` is [problems, samples]."""
    check_draws(num_bootstrap)
    rng = np.random.default_rng(seed)
    means = [score(p, rng.integers(shape[1], size=(num_bootstrap, k))).mean() for p in range(shape[0])]
    return np.asarray(means, dtype=np.float64)


def finite_table(c: Any) -> Floats:
    """``c`` as float64 ``[problems, samples]``.

    Raises:
        ShapeError, DataError: it has another shape, no values, or one that is not finite.
    """
    try:
        values = np.asarray(c, dtype=np.float64)
    except (TypeError, ValueError) as error:
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


def check_draws(num_bootstrap: int) -> None:
    """Raises DataError if ``num_bootstrap`` is less than 1."""
    if num_bootstrap < 1:
        raise DataError(f"num_bootstrap={num_bootstrap}: must be at least 1")
