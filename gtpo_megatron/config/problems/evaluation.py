"""Held-out accuracy during training."""

from dataclasses import replace

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import require_seed
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.problems.dataset import DatasetRef, parse_dataset, parse_datasets
from gtpo_megatron.config.problems.prompt import BOXED_TEMPLATE, check_template
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import ConfigError

HELDOUT = "heldout"
"""Label of the set that ``path`` names, in metric names."""

BEST_OF = (32, 16)
"""Of the early paper's reward curves; drawn with replacement, so they exist for any number of samples."""

_MEASURES = (
    "mean_at_k",
    "interval_low",
    "interval_high",
    "pass_at_k",
    "failed_count",
    *(f"best_at_{k}" for k in BEST_OF),
)


def metric_names(label: str) -> tuple[str, ...]:
    """What is measured of a set, by its label: mean, the ends of its interval, pass, failures, best of ``BEST_OF``."""
    return tuple(f"eval/{label}_{measure}" for measure in _MEASURES)


@configuration
class EvaluationConfig:
    """The held-out sets, measured before the first step, every few steps, and after the last.

    Attributes:
        path: rows as in the training set; their metrics are ``eval/heldout_*``. Empty: ``benchmarks`` alone.
        prompt_column: of the rows of ``path`` and of benchmarks in files, as in ``data``; known benchmarks have theirs.
            Empty: that of ``data`` in rows that have it, else the usual names.
        answer_column: of the reference answer in the same rows; empty: as for ``prompt_column``.
        benchmarks: more sets, such as ``aime24``, ``math500=FILE``; their metrics are ``eval/aime24_*`` and so on.
        every_steps: steps between measurements; 0 measures before and after only.
        num_problems: how many rows of each set, from the first; 0 takes all.
        samples: responses a problem, the ``k`` of mean@k.
        sampling: the distribution that answers are drawn from.
        seed: of the samples; the same at every measurement.
        prompt_template: put around the bare questions of benchmarks; ``{problem}`` stands for the question.
    """

    path: str = ""
    prompt_column: str = ""
    answer_column: str = ""
    benchmarks: tuple[str, ...] = ()
    every_steps: NonNegativeInt = 10
    num_problems: NonNegativeInt = 0
    samples: PositiveInt = 8
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 20250804
    prompt_template: str = BOXED_TEMPLATE

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)
        check_template("prompt_template", self.prompt_template)
        if HELDOUT in self.sets and len(self.sets) < len(self.benchmarks) + bool(self.path.strip()):
            raise ConfigError(f"benchmarks={self.benchmarks!r}: the name {HELDOUT!r} is that of path; take another")
        if not self.sets:
            raise ConfigError("path and benchmarks are both empty: accuracy must be measured on something held out")

    @property
    def sets(self) -> dict[str, DatasetRef]:
        """Every set by its label in metric names, ``path`` first."""
        heldout = {HELDOUT: parse_dataset(self.path, "path")} if self.path.strip() else {}
        named = heldout | {ref.label: ref for ref in parse_datasets(self.benchmarks, "benchmarks")}
        return {
            label: replace(ref, prompt_column=self.prompt_column, answer_column=self.answer_column)
            for label, ref in named.items()
        }
