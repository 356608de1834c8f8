"""What the metrics of held-out sets are called, and their mean over benchmarks."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.evaluation import HELDOUT
from gtpo_megatron.run_folder.finite import finite

_MEAN = re.compile(r"eval/([a-z0-9_]+)_mean_at_k")


def mean_metric(label: str) -> str:
    """Name of a set's mean@k."""
    return f"eval/{label}_mean_at_k"


def set_name(label: str) -> str:
    """What a reader calls a set: ``held-out`` is the run's own, benchmarks go by their labels."""
    return "held-out" if label == HELDOUT else label


def labels_among(metrics: Iterable[str]) -> list[str]:
    """Labels of the sets whose mean@k is among metric names: the run's own first, the others as they come."""
    labels = dict.fromkeys(match.group(1) for name in metrics if (match := _MEAN.fullmatch(name)))
    return [HELDOUT] * (HELDOUT in labels) + [label for label in labels if label != HELDOUT]


def interval(row: Mapping[str, Any], label: str) -> tuple[float, float]:
    """The 95% interval of a set's mean@k in one line of metrics; NaN where it is not there."""
    low, high = (finite(row.get(f"eval/{label}_interval_{end}")) for end in ("low", "high"))
    return (math.nan, math.nan) if low is None or high is None else (low, high)


@dataclass(frozen=True, slots=True)
class BenchmarkMean:
    """The plain mean of mean@k over benchmarks, with its 95% interval; NaN where an interval of theirs is not there.

    The metrics have the interval ``[l_i, u_i]`` of each benchmark's mean ``m_i``, but no longer its problems. Those of
    different benchmarks are independent, so the distances to the ends add up in squares (Zou and Donner 2008):
    ``mean - sqrt(sum (m_i - l_i)^2) / n`` and ``mean + sqrt(sum (u_i - m_i)^2) / n``. ``evaluate`` has the problems,
    and draws them again instead. A benchmark without any correct answer, or without a wrong one, has an interval of no
    width, as a bootstrap gives it: the mean's is then too narrow.
    """

    mean: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, row: Mapping[str, Any], labels: Sequence[str]) -> "BenchmarkMean | None":
        """From one line of metrics; None where a benchmark is missing, or there are fewer than two.

        Args:
            row: metrics by name.
            labels: of sets; the run's own held-out set is no benchmark.
        """
        benchmarks = [label for label in labels if label != HELDOUT]
        means = [mean for label in benchmarks if (mean := finite(row.get(mean_metric(label)))) is not None]
        if len(means) < max(2, len(benchmarks)):
            return None
        ends = [interval(row, label) for label in benchmarks]
        mean = sum(means) / len(means)
        below = math.hypot(*(own - low for own, (low, _) in zip(means, ends, strict=True))) / len(means)
        above = math.hypot(*(high - own for own, (_, high) in zip(means, ends, strict=True))) / len(means)
        return cls(mean, (mean - below, mean + above))
