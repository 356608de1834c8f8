"""From graded responses to the figures that papers report, of every problem and of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gtpo_megatron.batch import Problem
from gtpo_megatron.data.contamination import normalised
from gtpo_megatron.evaluation.metrics import (
    NUM_BOOTSTRAP,
    Floats,
    Interval,
    best_at_k_per_problem,
    bootstrap_interval,
    bootstrap_intervals,
    maj_at_k_per_problem,
    pass_at_k_per_problem,
)
from gtpo_megatron.evaluation.response_file import GradedResponse
from gtpo_megatron.observability.correctness import are_correct


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemResponses:
    """One problem with all its responses, by sample number."""

    problem: Problem
    responses: Sequence[GradedResponse]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The figures of a benchmark, over the problems whose responses are all there.

    Attributes:
        mean_at_k: share of correct responses, by the threshold; k is the number of samples.
        mean_reward: mean reward; the same as ``mean_at_k`` for rewards of 0 and 1.
        pass_at_k: by k; unbiased probability that one of k responses is correct.
        best_at_k: by k; expected best reward of k responses drawn with replacement.
        maj_at_k: by k; reward of the commonest answer of k drawn with replacement; None where the reward function's
            module does not say what the answer of a response is.
        per_problem: the same of each problem, as JSON values, in the order of the benchmark.
        truncated_frac: share of responses that the length limit cut.
        num_failed: responses without a verdict; they count as wrong.
        response_tokens_mean: mean length.
    """

    mean_at_k: Interval
    mean_reward: Interval
    pass_at_k: dict[int, Interval]
    best_at_k: dict[int, Interval]
    maj_at_k: dict[int, Interval] | None
    per_problem: list[dict[str, Any]]
    truncated_frac: float
    num_failed: int
    response_tokens_mean: float


def score(
    problems: Sequence[ProblemResponses], *, ks: Sequence[int], threshold: float, seed: int, has_answers: bool
) -> Scores:
    """Computes every figure, with 95% intervals by bootstrap over problems.

    A response without a verdict counts as wrong, with reward 0. In maj@k all correct responses vote for the reference
    answer, however they write it; other answers are compared as text, presentation aside.

    Args:
        problems: at least one, all with the same number of responses.
        ks: each at most that number.
        threshold: a response is correct where its reward is at least this, both as float32, as in training.
        seed: of the bootstrap.
        has_answers: whether final answers were extracted.
    """
    rewards, correct = _graded(problems, threshold)
    passes = {k: pass_at_k_per_problem(correct, k) for k in ks}
    bests = {k: best_at_k_per_problem(rewards, k) for k in ks}
    majorities: dict[int, Floats] | None = None
    if has_answers:
        votes = [
            [vote(r, p.problem.answer, is_correct=bool(c)) for r, c in zip(p.responses, row, strict=True)]
            for p, row in zip(problems, correct, strict=True)
        ]
        majorities = {k: maj_at_k_per_problem(rewards, votes, k, seed=seed) for k in ks}

    figures = [correct.mean(axis=1), rewards.mean(axis=1), *passes.values(), *bests.values()]
    figures += [] if majorities is None else list(majorities.values())
    intervals = iter(bootstrap_intervals(np.stack(figures, axis=1), seed=seed))
    return Scores(
        mean_at_k=next(intervals),
        mean_reward=next(intervals),
        pass_at_k={k: next(intervals) for k in passes},
        best_at_k={k: next(intervals) for k in bests},
        maj_at_k=None if majorities is None else {k: next(intervals) for k in majorities},
        per_problem=[
            _of_problem(problem, i, correct[i], rewards[i], passes, bests, majorities)
            for i, problem in enumerate(problems)
        ],
        truncated_frac=float(np.mean([[r.is_truncated for r in p.responses] for p in problems])),
        num_failed=sum(r.failure is not None for p in problems for r in p.responses),
        response_tokens_mean=float(np.mean([[r.num_tokens for r in p.responses] for p in problems])),
    )


def mean_so_far(problems: Sequence[ProblemResponses], *, threshold: float, seed: int) -> Interval:
    """mean@k alone, for a file that is written every few seconds: milliseconds, by fewer resamples.

    Args:
        problems: as for :func:`score`.
        threshold: as for :func:`score`.
        seed: of the bootstrap.
    """
    _, correct = _graded(problems, threshold)
    return bootstrap_interval(correct.mean(axis=1), num_bootstrap=NUM_BOOTSTRAP, seed=seed)


def _graded(problems: Sequence[ProblemResponses], threshold: float) -> tuple[Floats, Floats]:
    """Rewards and correctness, both ``[problems, samples]``; 0 where there is no verdict."""
    rewards = np.array([[r.reward for r in p.responses] for p in problems], dtype=np.float64)
    failed = np.array([[r.failure is not None for r in p.responses] for p in problems])
    correct = (are_correct(rewards, threshold=threshold) & ~failed).astype(np.float64)
    return np.where(failed, 0.0, rewards), correct


def vote(response: GradedResponse, reference: str, *, is_correct: bool) -> str | None:
    """What a response votes for: the reference if it is correct, else its answer; None if it has none."""
    if is_correct:
        return reference
    if response.answer is None:
        return None
    text = normalised(response.answer)
    return f"wrong: {text}" if text else None


def _of_problem(
    problem: ProblemResponses,
    index: int,
    correct: Floats,
    rewards: Floats,
    passes: dict[int, Floats],
    bests: dict[int, Floats],
    majorities: dict[int, Floats] | None,
) -> dict[str, Any]:
    responses = problem.responses

    def by_k(values: dict[int, Floats]) -> dict[str, float]:
        return {str(k): float(per_problem[index]) for k, per_problem in values.items()}

    return {
        "problem_id": problem.problem.problem_id,
        "answer": problem.problem.answer,
        "num_samples": len(responses),
        "num_correct": int(correct.sum()),
        "num_truncated": sum(r.is_truncated for r in responses),
        "num_failed": sum(r.failure is not None for r in responses),
        "mean_at_k": float(correct.mean()),
        "mean_reward": float(rewards.mean()),
        "pass_at_k": by_k(passes),
        "best_at_k": by_k(bests),
        "maj_at_k": None if majorities is None else by_k(majorities),
        "response_tokens_mean": float(np.mean([r.num_tokens for r in responses])),
    }
