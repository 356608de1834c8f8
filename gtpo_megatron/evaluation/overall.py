"""One figure over several benchmarks."""

from collections.abc import Collection, Mapping
from typing import Any

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.evaluation.earlier_results import Entry, finished_figures, has_figures
from gtpo_megatron.evaluation.metrics import Interval, mean_intervals

COMPARABLE = ("samples", "success_threshold")
BY_K = ("pass_at_k", "best_at_k", "maj_at_k")


def mean_over_benchmarks(
    entries: Mapping[str, Entry], *, measured: Collection[str], config: EvaluateConfig
) -> dict[str, Any] | None:
    """The plain mean of every figure: each benchmark counts alike, whatever its size.

    Intervals take the benchmarks as given and the problems within each as drawn.

    Args:
        entries: of ``evaluation.json``, by label.
        measured: labels of those that are measured now. Of the others the whole measurement counts that they have kept,
            and they are left out where it is of other samples, ks or threshold, or of fewer problems than would be
            measured now: a trial of two problems would weigh as much as a whole benchmark.
        config: of the evaluation: responses a problem, threshold, ks, number of problems, seed of the bootstrap.

    Returns:
        As JSON values, with the labels that were averaged, the number of problems of each, and why others were left
        out; None where there is none.
    """
    ks = config.resolved_ks
    candidates = {
        label: entry if label in measured else finished_figures(entry) or entry for label, entry in entries.items()
    }
    left_out = {
        label: reason
        for label, entry in candidates.items()
        if label not in measured and (reason := _reason_against(entry, config))
    }
    found = {label: entry for label, entry in candidates.items() if has_figures(entry) and label not in left_out}
    if not found:
        return None
    by_k = [name for name in BY_K if all(entry[name] is not None for entry in found.values())]
    places = [("mean_at_k", None), ("mean_reward", None), *((name, k) for name in by_k for k in ks)]
    tables = [[[_of_problem(p, *place) for place in places] for p in e["problems"]] for e in found.values()]
    intervals = dict(zip(places, mean_intervals(tables, seed=config.seed), strict=True))
    return {
        "benchmarks": list(found),
        "num_benchmarks": len(found),
        "num_problems": {label: entry["num_complete"] for label, entry in found.items()},
        "left_out": left_out,
        "mean_at_k": as_json(intervals["mean_at_k", None]),
        "mean_reward": as_json(intervals["mean_reward", None]),
        **{name: {str(k): as_json(intervals[name, k]) for k in ks} if name in by_k else None for name in BY_K},
    }


def _reason_against(entry: Entry, config: EvaluateConfig) -> str:
    """Why an entry of an earlier evaluation cannot be averaged with those of this one; empty where it can."""
    if entry["num_complete"] < entry["num_problems"]:
        return f"{entry['num_complete']} of {entry['num_problems']} problems"
    if not has_figures(entry):
        return "no figures yet"
    if any(entry[name] != getattr(config, name) for name in COMPARABLE):
        return "other samples or threshold"
    if set(entry["pass_at_k"]) != {str(k) for k in config.resolved_ks}:
        return "other ks"
    rows = entry["dataset"]
    in_set = rows["num_rows"] - rows["num_repeated"] - rows["num_dropped_long"]
    wanted = min(config.num_problems or in_set, in_set)
    return f"{entry['num_problems']} of {wanted} problems" if entry["num_problems"] < wanted else ""


def as_json(interval: Interval) -> dict[str, float]:
    """An interval as ``evaluation.json`` has it."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _of_problem(problem: Mapping[str, Any], name: str, k: int | None) -> float:
    return float(problem[name] if k is None else problem[name][str(k)])
