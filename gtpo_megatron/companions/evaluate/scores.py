"""Figures of graded responses, of one benchmark and of the mean over several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse
from gtpo_megatron.data.contamination import normalised
from gtpo_megatron.evaluation.intervals import Interval, mean_intervals
from gtpo_megatron.evaluation.metrics import Floats, best_at_k_per_problem, maj_at_k_per_problem, pass_at_k_per_problem

REWARD = "reward"
CORRECT = "correct"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The figures of a benchmark, over the problems that have all their responses.

    Names of figures: ``mean@n``, the fraction of correct responses of n samples; ``reward``, the mean reward;
    ``pass@k``, the unbiased probability that one of k responses is correct; ``best@k``, the expected highest reward of
    k responses drawn with replacement; ``maj@k``, the reward of the most frequent answer of k drawn with replacement,
    only if the reward function's module can extract answers.

    Attributes:
        per_problem: ``[problems]`` values of each figure.
        intervals: mean of each figure over problems with its 95% interval.
        problems: counts of each problem, as JSON values.
        truncated_frac: fraction of responses that the length limit cut.
        num_failed: responses without a verdict; they count as incorrect.
        response_tokens_mean: mean response length.
    """

    per_problem: dict[str, Floats]
    intervals: dict[str, Interval]
    problems: list[dict[str, Any]]
    truncated_frac: float
    num_failed: int
    response_tokens_mean: float


def score(
    rows: Sequence[Sequence[GradedResponse]], *, ks: Sequence[int], threshold: float, seed: int, has_answers: bool
) -> Scores:
    """Computes every figure, with 95% intervals by bootstrap over problems.

    A response without a verdict counts as incorrect, with reward 0. In maj@k all correct responses have one answer;
    other answers are compared as normalised text.

    Args:
        rows: all responses of each problem; at least one problem, and equally many responses each.
        ks: each at most the number of responses per problem.
        threshold: a response is correct if its reward is at least this, both as float32, as in training.
        seed: seed of the bootstrap.
        has_answers: whether final answers were extracted.
    """
    failed = np.array([[one.failure is not None for one in row] for row in rows])
    rewards = np.where(failed, 0.0, np.array([[one.reward for one in row] for row in rows], dtype=np.float64))
    correct = (are_correct(rewards, threshold=threshold) & ~failed).astype(np.float64)
    truncated = np.array([[one.is_truncated for one in row] for row in rows])
    tokens = np.array([[one.num_tokens for one in row] for row in rows], dtype=np.float64)
    figures = {f"mean@{len(rows[0])}": correct.mean(axis=1), REWARD: rewards.mean(axis=1)}
    figures |= {f"pass@{k}": pass_at_k_per_problem(correct, k) for k in ks}
    figures |= {f"best@{k}": best_at_k_per_problem(rewards, k) for k in ks}
    if has_answers:
        votes = [
            [CORRECT if is_correct else vote(one) for one, is_correct in zip(row, flags, strict=True)]
            for row, flags in zip(rows, correct, strict=True)
        ]
        figures |= {f"maj@{k}": maj_at_k_per_problem(rewards, votes, k, seed=seed) for k in ks}
    return Scores(
        per_problem=figures,
        intervals=mean_over([figures], seed=seed),
        problems=[
            {
                "problem_id": row[0].problem_id,
                "answer": row[0].reference,
                "num_samples": len(row),
                "num_correct": int(correct[i].sum()),
                "num_truncated": int(truncated[i].sum()),
                "num_failed": int(failed[i].sum()),
                "response_tokens_mean": float(tokens[i].mean()),
            }
            for i, row in enumerate(rows)
        ],
        truncated_frac=float(truncated.mean()),
        num_failed=int(failed.sum()),
        response_tokens_mean=float(tokens.mean()),
    )


def mean_over(benchmarks: Sequence[Mapping[str, Floats]], *, seed: int) -> dict[str, Interval]:
    """Unweighted means over benchmarks of the figures that all have.

    The intervals resample problems within each benchmark.

    Args:
        benchmarks: ``[problems]`` values by figure, of at least one benchmark.
        seed: seed of the bootstrap.
    """
    names = [name for name in benchmarks[0] if all(name in one for one in benchmarks)]
    tables = [np.stack([one[name] for name in names], axis=1) for one in benchmarks]
    return dict(zip(names, mean_intervals(tables, seed=seed), strict=True))


def vote(response: GradedResponse) -> str | None:
    """The vote of an incorrect response; None if it has no answer."""
    text = normalised(response.answer) if response.answer is not None else ""
    return f"incorrect: {text}" if text else None


Flags = np.ndarray[Any, np.dtype[np.bool_]]


def are_correct(rewards: ArrayLike, *, threshold: float) -> Flags:
    """``r_i >= threshold`` in float32, the dtype of rewards in training, so that tables agree with training.

    Args:
        rewards: any shape, including a single number.
        threshold: lowest reward of a correct response.

    Returns:
        Flags of the same shape.
    """
    with np.errstate(over="ignore"):  # overflow gives infinity, as in torch
        return np.asarray(np.asarray(rewards).astype(np.float32) >= np.float32(threshold))
