"""Metric values that can be merged over ranks, and the format of their names.

A rank reports sums and counts, not averages; :func:`to_scalars` divides once after merging. A value that several ranks
hold (such as the tensor-parallel ranks of one data-parallel rank) must be reported by one of them only.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.histogram import Histogram

T = TypeVar("T")

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")
"""``stage/quantity_unit``: lower case, digits and underscores, exactly one slash."""

NONDETERMINISTIC_STAGES = frozenset({"timing", "memory", "throughput", "health"})
"""Stages whose values differ between two runs of one seed, because they measure the machine."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over ranks, such as the number of failed rewards."""

    total: float


@dataclass(frozen=True, slots=True)
class Mean:
    """``sum total / sum count`` over ranks.

    Attributes:
        total: sum of the values on this rank; as a fraction, it is added up over ranks without rounding.
        count: their number (tokens, responses) or their weight; the mean is NaN if the total count is 0.
    """

    total: float | Fraction
    count: float | Fraction

    def __post_init__(self) -> None:
        if self.count < 0:
            raise DataError(
                f"Mean: got count={self.count}, expected 0 or more; give the number of values summed in total"
            )


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value over ranks."""

    value: float


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value over ranks."""

    value: float


Metric = Sum | Mean | Max | Min | Histogram
"""A histogram of values over all ranks becomes two scalars, their median and 99th percentile."""

QUANTILES = {"p50": 0.5, "p99": 0.99}
"""Of a histogram, by the ending of their names."""


def check_name(name: str) -> None:
    """Checks that ``name`` is ``stage/quantity_unit``.

    Raises:
        DataError: it is not.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise DataError(
            f"metric name {name!r}: expected stage/quantity_unit in lower case, such as rollout/response_length_tokens"
        )


def merge(records: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the records of several ranks; the result does not depend on their order, bit for bit.

    Args:
        records: one mapping per rank; a metric may be missing on some.

    Returns:
        One value per name, of the same type, sorted by name.

    Raises:
        DataError: a malformed name, or one name with two types of metric.
    """
    by_name: dict[str, list[Metric]] = {}
    for record in records:
        for name, metric in record.items():
            by_name.setdefault(name, []).append(metric)
    merged: dict[str, Metric] = {}
    for name in sorted(by_name):
        check_name(name)
        merged[name] = _merge_one(name, by_name[name])
    return merged


def to_scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Converts merged metrics to floats.

    Args:
        metrics: metrics merged over ranks.

    Returns:
        One float per name, sorted by name; of a histogram ``NAME_p50`` and ``NAME_p99``. A :class:`Mean` with count 0
        is NaN.

    Raises:
        DataError: a malformed name.
    """
    scalars: dict[str, float] = {}
    for name in sorted(metrics):
        check_name(name)
        metric = metrics[name]
        match metric:
            case Sum():
                scalars[name] = float(metric.total)
            case Mean():
                scalars[name] = float(metric.total) / float(metric.count) if metric.count else math.nan
            case Max() | Min():
                scalars[name] = float(metric.value)
            case Histogram():
                scalars |= {f"{name}_{ending}": metric.quantile(share) for ending, share in QUANTILES.items()}
    return scalars


def is_deterministic(name: str) -> bool:
    """Whether two runs of one seed on one machine must agree on this metric bit for bit."""
    return name.partition("/")[0] not in NONDETERMINISTIC_STAGES


def deterministic(scalars: Mapping[str, T]) -> dict[str, T]:
    """The metrics that must be equal in two runs of one seed: without times, memory and throughput.

    Args:
        scalars: values by metric name; other keys, such as ``step``, are kept.
    """
    return {name: value for name, value in scalars.items() if is_deterministic(name)}


def _merge_one(name: str, values: list[Metric]) -> Metric:
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise DataError(f"metric {name!r}: got {' and '.join(kinds)} from different ranks, expected one type")
    first = values[0]
    if isinstance(first, Sum):
        return Sum(float(_exact_sum([value.total for value in values if isinstance(value, Sum)])))
    if isinstance(first, Mean):
        means = [value for value in values if isinstance(value, Mean)]
        return Mean(_exact_sum([value.total for value in means]), _exact_sum([value.count for value in means]))
    if isinstance(first, Histogram):
        return sum((value for value in values if isinstance(value, Histogram)), start=Histogram())
    extremes = [value.value for value in values if isinstance(value, Max | Min)]
    if any(math.isnan(value) for value in extremes):
        return type(first)(math.nan)  # max() and min() treat NaN depending on the order
    return Max(max(extremes)) if isinstance(first, Max) else Min(min(extremes))


def _exact_sum(values: Sequence[float | Fraction]) -> float | Fraction:
    """Correctly rounded sum, independent of the order; exact of fractions; infinities and NaN are propagated."""
    if all(isinstance(value, Fraction) for value in values):
        return sum(values, start=Fraction())
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return float(sum(values))
