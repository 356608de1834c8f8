"""Held-out accuracy of the current policy during training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gtpo_megatron.batch import ENDED_UNGRADED, Problem, PromptBatch, RewardBatch
from gtpo_megatron.config.problems import BEST_OF, HELDOUT, EvaluationConfig, metric_names
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.evaluation.intervals import bootstrap_interval
from gtpo_megatron.evaluation.metrics import best_at_k, mean_at_k, pass_at_k
from gtpo_megatron.outcomes import is_correct

SampleAndGrade = Callable[[PromptBatch], RewardBatch]
"""Samples every prompt ``samples`` times with the evaluation's seed, prompt-major, and grades."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSet:
    """A set of held-out problems.

    Attributes:
        label: label of the set in metric names.
        problems: problems, already cut to ``EvaluationConfig.num_problems``.
        num_contaminated: number of them that are also in the training set.
    """

    label: str
    problems: Sequence[Problem]
    num_contaminated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutResult:
    """Accuracy over one set; a response without a verdict counts as incorrect.

    Attributes:
        label: label of the set.
        mean_at_k: mean over problems of the fraction of correct samples.
        interval: its 95% bootstrap interval over problems.
        pass_at_k: fraction of problems with a correct sample.
        best_at: expected highest reward of 32 and of 16 responses, drawn with replacement from the samples.
        num_problems: number of problems.
        samples: samples ``k`` per problem.
        num_failed: responses without a verdict.
        commonest_failure: most frequent reason of missing verdicts, with its count.
        num_ungraded: episodes that a limit ended before they were graded; their reward is 0.
    """

    label: str
    mean_at_k: float
    interval: tuple[float, float]
    pass_at_k: float
    best_at: dict[int, float]
    num_problems: int
    samples: int
    num_failed: int
    num_ungraded: int = 0
    commonest_failure: str = ""

    def metrics(self) -> dict[str, float]:
        """The values by metric name."""
        best_at = (self.best_at[k] for k in BEST_OF)
        values = (self.mean_at_k, *self.interval, self.pass_at_k, float(self.num_failed), *best_at)
        return dict(zip(metric_names(self.label), values, strict=True))

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{'held-out' if self.label == HELDOUT else self.label} mean@{self.samples} {100 * self.mean_at_k:.1f}% "
            f"(95% interval {100 * low:.1f} to {100 * high:.1f}), "
            f"pass@{self.samples} {100 * self.pass_at_k:.1f}%, {self.num_problems} problems"
        )


def evaluate(
    heldout: HeldOutSet, config: EvaluationConfig, sample_and_grade: SampleAndGrade, *, threshold: float
) -> HeldOutResult:
    """Samples and grades every problem of a set.

    Args:
        heldout: the set.
        config: number of samples and the interval's seed.
        sample_and_grade: samples from the policy to measure, and grades.
        threshold: a response is correct if its reward is at least this.

    Raises:
        RolloutError: no response has a verdict, so there is no accuracy.
    """
    problems = heldout.problems
    prompts = PromptBatch(problems=tuple(problems), group_ids=tuple(range(len(problems))))
    rewards = sample_and_grade(prompts)
    if bool(rewards.failed.all()):
        raise RolloutError(
            f"the reward function has no verdict on any of {len(rewards.failed)} responses to {heldout.label} "
            f"problems; {rewards.commonest_failure or 'log.txt says what it raised'}"
        )
    correct = is_correct(rewards.rewards, success_threshold=threshold) & ~rewards.failed
    table = correct.double().reshape(len(problems), config.samples).tolist()
    values = rewards.rewards.double().masked_fill(rewards.failed, 0.0).reshape(len(problems), config.samples).numpy()
    ungraded = rewards.parts.get(ENDED_UNGRADED, torch.zeros(1))
    interval = bootstrap_interval([sum(row) / len(row) for row in table], seed=config.seed)
    return HeldOutResult(
        label=heldout.label,
        mean_at_k=mean_at_k(table),
        interval=(interval.low, interval.high),
        pass_at_k=pass_at_k(table, config.samples),
        best_at={k: best_at_k(values, k) for k in BEST_OF},
        num_problems=len(problems),
        samples=config.samples,
        num_failed=int(rewards.failed.sum()),
        num_ungraded=int((ungraded.nan_to_num() * ~rewards.failed).sum()),
        commonest_failure=rewards.commonest_failure,
    )
