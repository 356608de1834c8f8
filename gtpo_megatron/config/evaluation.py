"""Held-out accuracy during training."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import require_non_negative, require_positive, require_text
from gtpo_megatron.config.rollout import SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """The held-out set, measured before the first step, every few steps, and after the last.

    Attributes:
        path: rows as in the training set.
        every_steps: steps between measurements; 0 measures before and after only.
        num_problems: how many rows, from the first; 0 takes all.
        samples: responses a problem, the ``k`` of mean@k.
        sampling: the distribution that answers are drawn from.
        seed: of the samples; the same at every measurement.
    """

    path: str
    every_steps: int = 10
    num_problems: int = 0
    samples: int = 8
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 20250804

    def __post_init__(self) -> None:
        require_text(path=self.path)
        require_positive(samples=self.samples)
        require_non_negative(every_steps=self.every_steps, num_problems=self.num_problems, seed=self.seed)
