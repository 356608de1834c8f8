"""Metric values that ranks can merge, and the names they go by.

A rank never reports an average: it reports the sums that an average is made of, so that ranks with different numbers of
tokens merge without weights and each number is divided exactly once, in :func:`to_scalars`. Values that several ranks
hold in common (all tensor-parallel ranks of one data-parallel rank, say) must be reported by one of them only.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gtpo_megatron.errors import DataError

T = TypeVar("T")

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")
"""``stage/quantity_unit``: lower case, digits and underscores, exactly one slash."""

NONDETERMINISTIC_STAGES = frozenset({"timing", "memory", "throughput", "health"})
"""Stages whose values differ between two runs of one seed, because they are about the machine."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over ranks, such as a number of failed rewards."""

    total: float


@dataclass(frozen=True, slots=True)
class Mean:
    """``sum total / sum count`` over ranks.

    Attributes:
        total: sum of the values on this rank.
        count: how many there are (tokens, responses); 0 is legal. A mean of nothing is NaN, never 0.
    """

    total: float
    count: float

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


Metric = Sum | Mean | Max | Min


def check_name(name: str) -> None:
    """Raises unless ``name`` is ``stage/quantity_unit``.

    Raises:
        DataError: naming the metric and the pattern.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise DataError(
            f"metric name {name!r}: expected stage/quantity_unit in lower case, such as rollout/response_length_tokens"
        )


def merge(records: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merges the records of several ranks into one; the order of the ranks does not change a bit of the result.

    Args:
        records: one mapping a rank; a metric may be missing on some of them.

    Returns:
        One value a name, of the same type, ready for another merge or for :func:`to_scalars`. Names are sorted.

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
    """The numbers to write, divided once.

    Args:
        metrics: merged over ranks.

    Returns:
        One float a name, sorted by name. A :class:`Mean` of nothing is NaN.

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
    return scalars


def is_deterministic(name: str) -> bool:
    """Whether two runs of one seed on one machine must agree on this metric to the last bit."""
    return name.partition("/")[0] not in NONDETERMINISTIC_STAGES


def deterministic(scalars: Mapping[str, T]) -> dict[str, T]:
    """Leaves out times, memory and throughput: what remains must be equal in two runs of one seed.

    Args:
        scalars: by metric name; other keys, such as ``step``, are kept.
    """
    return {name: value for name, value in scalars.items() if is_deterministic(name)}


def _merge_one(name: str, values: list[Metric]) -> Metric:
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise DataError(f"metric {name!r}: got {' and '.join(kinds)} from different ranks, expected one type")
    first = values[0]
    if isinstance(first, Sum):
        return Sum(_exact_sum([value.total for value in values if isinstance(value, Sum)]))
    if isinstance(first, Mean):
        means = [value for value in values if isinstance(value, Mean)]
        return Mean(_exact_sum([value.total for value in means]), _exact_sum([value.count for value in means]))
    extremes = [value.value for value in values if isinstance(value, Max | Min)]
    if any(math.isnan(value) for value in extremes):
        return type(first)(math.nan)  # max() and min() keep or lose a NaN depending on the order
    return Max(max(extremes)) if isinstance(first, Max) else Min(min(extremes))


def _exact_sum(values: list[float]) -> float:
    """Correctly rounded, so independent of the order; infinities and NaN pass through instead of raising."""
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return float(sum(values))
