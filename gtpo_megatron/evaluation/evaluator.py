"""Held-out accuracy of the current policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch
from gtpo_megatron.config.evaluation import EvaluationConfig
from gtpo_megatron.evaluation.metrics import bootstrap_interval, mean_at_k, pass_at_k

SampleAndGrade = Callable[[PromptBatch], RewardBatch]
"""Samples every prompt ``samples`` times with the evaluation's seed, prompt-major, and grades."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutResult:
    """Accuracy over the held-out problems; a response without a verdict counts as wrong, and is counted.

    Attributes:
        mean_at_k: mean over problems of the share of correct samples.
        interval: 95%, bootstrap over problems.
        pass_at_k: mean over problems of whether any sample is correct.
        num_problems: how many.
        samples: ``k``.
        num_failed: responses without a verdict.
    """

    mean_at_k: float
    interval: tuple[float, float]
    pass_at_k: float
    num_problems: int
    samples: int
    num_failed: int

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {
            "eval/heldout_mean_at_k": self.mean_at_k,
            "eval/heldout_interval_low": self.interval[0],
            "eval/heldout_interval_high": self.interval[1],
            "eval/heldout_pass_at_k": self.pass_at_k,
            "eval/heldout_failed_count": float(self.num_failed),
        }

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"held-out mean@{self.samples} {100 * self.mean_at_k:.1f}% "
            f"(95% interval {100 * low:.1f} to {100 * high:.1f}), "
            f"pass@{self.samples} {100 * self.pass_at_k:.1f}%, {self.num_problems} problems"
        )


def evaluate(
    problems: Sequence[Problem], config: EvaluationConfig, sample_and_grade: SampleAndGrade, *, threshold: float
) -> HeldOutResult:
    """Samples and grades every problem, then summarises.

    Args:
        problems: the held-out set, already cut to ``config.num_problems``.
        config: number of samples and the interval's seed.
        sample_and_grade: of the policy to measure.
        threshold: a response is correct where its reward is at least this.
    """
    prompts = PromptBatch(problems=tuple(problems), group_ids=tuple(range(len(problems))))
    rewards = sample_and_grade(prompts)
    correct = ((rewards.rewards >= threshold) & ~rewards.failed).double().reshape(len(problems), config.samples)
    table = correct.tolist()
    interval = bootstrap_interval([sum(row) / len(row) for row in table], seed=config.seed)
    return HeldOutResult(
        mean_at_k=mean_at_k(table),
        interval=(interval.low, interval.high),
        pass_at_k=pass_at_k(table, config.samples),
        num_problems=len(problems),
        samples=config.samples,
        num_failed=int(rewards.failed.sum()),
    )
