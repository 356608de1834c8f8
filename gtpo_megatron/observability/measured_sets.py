"""Names of the metrics of held-out sets, and their mean over benchmarks."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.problems import HELDOUT
from gtpo_megatron.run_folder.metrics_file import finite

_MEAN = re.compile(r"eval/([a-z0-9_]+)_mean_at_k")


def mean_metric(label: str) -> str:
    """Name of a set's mean@k."""
    return f"eval/{label}_mean_at_k"


def set_name(label: str) -> str:
    """The displayed name of a set: ``held-out`` for the run's own, the label for benchmarks."""
    return "held-out" if label == HELDOUT else label


def percent(accuracy: float) -> str:
    """An accuracy from 0 to 1 as it is displayed: ``61.5%``."""
    return f"{100 * accuracy:.1f}%"


def labels_among(metrics: Iterable[str]) -> list[str]:
    """Labels of the sets whose mean@k is among the metric names: the run's own first, the others in order."""
    labels = dict.fromkeys(match.group(1) for name in metrics if (match := _MEAN.fullmatch(name)))
    return [HELDOUT] * (HELDOUT in labels) + [label for label in labels if label != HELDOUT]


def interval(row: Mapping[str, Any], label: str) -> tuple[float, float]:
    """The 95% interval of a set's mean@k in one line of metrics; NaN if it is missing."""
    low, high = (finite(row.get(f"eval/{label}_interval_{end}")) for end in ("low", "high"))
    return (math.nan, math.nan) if low is None or high is None else (low, high)


@dataclass(frozen=True, slots=True)
class BenchmarkMean:
    """The unweighted mean of mean@k over benchmarks, with its 95% interval; NaN if the interval of one is missing.

    It is computed from the intervals ``[l_i, u_i]`` of the benchmarks' means ``m_i``, which are independent (Zou and
    Donner 2008): ``mean - sqrt(sum (m_i - l_i)^2) / n`` and ``mean + sqrt(sum (u_i - m_i)^2) / n``. The bootstrap
    interval of a benchmark with only correct or only incorrect answers has width 0; this interval is then too narrow.
    """

    mean: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, row: Mapping[str, Any], labels: Sequence[str]) -> "BenchmarkMean | None":
        """The mean of one row of metrics; None if a benchmark is missing, or there are fewer than two.

        Args:
            row: metrics by name.
            labels: labels of sets; the run's own held-out set is skipped.
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
