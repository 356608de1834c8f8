"""Time of a measurement on the held-out sets, measured by this run or estimated by the memory plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.adapters import adapter_of
from gtpo_megatron.data.records import read_records

ESTIMATE_MARGIN = 1.7
"""Factor on estimates: a published run's time over its estimate (docs/planning.md)."""


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
    """Responses of a measurement, by label of the set: known sets' published sizes, local files' own."""
    evaluation, found = config.evaluation, {}
    for label, dataset in evaluation.sets.items():
        if dataset.path:
            num = sum(1 for _ in read_records(dataset.path)) if Path(dataset.path).is_file() else 0
        else:
            num = adapter_of(dataset.name).num_problems
        found[label] = min(evaluation.num_problems or num, num) * evaluation.samples
    return found


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
    """This run's longest measurement, divided by the sets' responses, else the estimate.

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
    total = sum(responses.values())
    by_set = {label: measured * num / total for label, num in responses.items()} if total else {}
    return EvaluationTime(by_set=by_set, source="this run's longest measurement", is_measured=True)
