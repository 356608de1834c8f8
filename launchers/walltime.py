"""Slurm's notations of time, how long a job measures at its start, and the check of its time limit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.config.generated import shares
from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.adapters import ADAPTERS, adapter_at
from gtpo_megatron.data.records import read_records
from gtpo_megatron.errors import ConfigError, GTPOError

SECONDS = (1, 60, 3600)
DAY_S = 86400

START_UP_S = 60.0
"""Shortest time from a job's start to its first step."""

ROOM_TO_SAVE = 1.2
"""Factor on the longest held-out set, after which the driver saves."""


ESTIMATE_MARGIN = 1.7
"""Factor on estimates: 1.5 of dense published runs, 1.9 of those with experts (docs/planning_reference.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTime:
    """Time of one measurement.

    Attributes:
        by_set: seconds by label of the held-out set; empty if unknown.
        source: source of the numbers, for messages.
        is_measured: measured by this run, whose held-out sets can no longer be changed.
    """

    by_set: Mapping[str, float]
    source: str
    is_measured: bool = False

    @property
    def total_s(self) -> float:
        """Seconds of all sets."""
        return sum(self.by_set.values())

    @property
    def longest(self) -> tuple[str, float]:
        """The set that takes longest, and its seconds; a run can stop only between two sets."""
        return max(self.by_set.items(), key=lambda item: item[1], default=("", 0.0))


def num_responses(config: RunConfig) -> dict[str, int]:
    """Responses of a measurement, by label of the set; 0 if nobody knows how many problems it has."""
    evaluation, found = config.evaluation, {}
    for label, dataset in evaluation.sets.items():
        num, most = _num_problems(dataset), evaluation.num_problems
        found[label] = min(num or most, most or num) * evaluation.samples
    return found


def _num_problems(dataset: DatasetRef) -> int:
    """Problems of a set: a generated one's own size, a local file's, a published one's of the hub; 0 if unknown.

    Reads no network, and raises nothing: it is for estimates.
    """
    if dataset.generated:
        return sum(shares(dataset.generated))
    if dataset.path:
        try:
            return sum(1 for _ in read_records(dataset.path)) if Path(dataset.path).is_file() else 0
        except (GTPOError, OSError):
            return 0  # the run itself will say what is wrong with the file
    if not dataset.repository:
        return ADAPTERS[dataset.name].num_problems if dataset.name in ADAPTERS else 0
    usual = adapter_at(dataset.repository, dataset.subset)
    if usual is None:
        return 0
    # several known sets are splits of one repository
    place = (usual.hub.repository, usual.hub.subset, dataset.split or usual.hub.split)
    known = (one for one in ADAPTERS.values() if (one.hub.repository, one.hub.subset, one.hub.split) == place)
    return next((one.num_problems for one in known), 0)


def estimated_s(request: PlanRequest, layout: Layout, config: RunConfig) -> dict[str, float]:
    """Seconds by label, as the memory plan estimates a step's generation: half the longest response is the mean."""
    longest = config.evaluation.sampling.max_response_tokens
    seconds = {}
    for label, num in num_responses(config).items():
        batch = replace(
            request.batch,
            num_responses=num,
            max_sequence_tokens=config.data.max_prompt_tokens + longest,
            max_response_tokens=longest,
            mean_response_tokens=longest / 2,
        )
        seconds[label] = assess(replace(request, batch=batch), layout).time.generate if num else 0.0
    return seconds


def evaluation_time(
    rows: Sequence[Mapping[str, Any]], estimated: Mapping[str, float], config: RunConfig
) -> EvaluationTime:
    """This run's longest measurement, divided by the sets' responses if all are known, else the estimate.

    Args:
        rows: rows of the run's ``metrics.jsonl``, if it has begun.
        estimated: estimates by label; empty without GPUs.
        config: of the run.
    """
    measured = max((row.get("timing/evaluation_s") or 0.0 for row in rows), default=0.0)
    if not measured:
        by_set = {label: ESTIMATE_MARGIN * seconds for label, seconds in estimated.items()}
        return EvaluationTime(by_set=by_set, source=f"{ESTIMATE_MARGIN} times the estimate of gtpo-megatron plan")
    responses = num_responses(config)
    if len(responses) == 1:
        responses = dict.fromkeys(responses, 1)  # whatever its size, all of the time is this set's
    total = sum(responses.values())
    by_set = {label: measured * num / total for label, num in responses.items()} if all(responses.values()) else {}
    return EvaluationTime(by_set=by_set, source="this run's longest measurement", is_measured=True)


def to_seconds(text: str) -> int:
    """``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``, ``days-hours:minutes``, ...

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2})|(\d+(:\d+){0,2})", text):
        raise ConfigError(f"--time {text!r}: must be minutes, hours:minutes:seconds or days-hours, such as 04:00:00")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # then hours come first
        seconds = sum(part * unit for part, unit in zip(parts, reversed(SECONDS), strict=False))
    elif len(parts) == 1:
        seconds = parts[0] * 60
    else:
        seconds = sum(part * unit for part, unit in zip(reversed(parts), SECONDS, strict=False))
    total = int(days or 0) * DAY_S + seconds
    if total <= 0:
        raise ConfigError(f"--time {text!r}: must be greater than 0")
    return total


def check_room(
    text: str, *, stop_before_s: int, step_s: float, source: str, evaluation: EvaluationTime | None = None
) -> None:
    """Checks that a job can start, measure, do one step and save within its time limit.

    Args:
        text: the limit.
        stop_before_s: time of the warning before the limit; a step and a save must fit into it.
        step_s: time of a step; 0 if unknown.
        source: source of ``step_s``, for messages.
        evaluation: time of a measurement, if known.

    Raises:
        ConfigError: the job would end without having saved anything.
    """
    limit = to_seconds(text)
    if limit < stop_before_s + START_UP_S:
        raise ConfigError(
            f"--time {text} is {limit} s: the driver is asked to stop {stop_before_s} s before that (--stop-before-s), "
            f"which leaves less than {START_UP_S:.0f} s to start; ask for more time"
        )
    if step_s > stop_before_s:
        raise ConfigError(
            f"--stop-before-s {stop_before_s} is shorter than a step, {step_s:.0f} s ({source}): the time limit would "
            f"end the step that the warning falls into, and its work be lost; give at least {2 * step_s:.0f}"
        )
    if evaluation is not None:
        _check_evaluation(text, limit, stop_before_s, evaluation)


def _check_evaluation(text: str, limit: int, stop_before_s: int, evaluation: EvaluationTime) -> None:
    label, longest_s = evaluation.longest
    less = "" if evaluation.is_measured else ", or measure less: --evaluation.num-problems, --evaluation.samples"
    if longest_s > stop_before_s:
        raise ConfigError(
            f"--stop-before-s {stop_before_s} is shorter than one held-out set takes to measure, {label} "
            f"{longest_s:.0f} s ({evaluation.source}): the driver hears of the time limit between two sets only, so "
            f"the limit would end the job there, and all steps since the last checkpoint be lost; give at least "
            f"{ROOM_TO_SAVE * longest_s:.0f}{less}"
        )
    needed = START_UP_S + evaluation.total_s + stop_before_s
    if limit < needed:
        raise ConfigError(
            f"--time {text} is {limit} s: a measurement on all held-out sets takes {evaluation.total_s:.0f} s "
            f"({evaluation.source}) and the driver is asked to stop {stop_before_s} s before the limit "
            f"(--stop-before-s): every job would begin the measurement before the first step anew; give at least "
            f"{needed:.0f} s{less}"
        )


def check_preflight_time(text: str, *, seconds: int) -> None:
    """Checks that a preflight ends within the job's time limit.

    Args:
        text: the limit.
        seconds: of the preflight.

    Raises:
        ConfigError: it may not.
    """
    if (limit := to_seconds(text)) < seconds + START_UP_S:
        raise ConfigError(
            f"--time {text} is {limit} s: Ray's start and the checks may take {START_UP_S:.0f} s and --preflight-s "
            f"{seconds}; ask for more time, or allow the checks less"
        )
