"""One figure over several benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.evaluation.earlier_results import Entry, has_figures
from gtpo_megatron.evaluation.metrics import Interval, mean_intervals

COMPARABLE = ("samples", "success_threshold")
BY_K = ("pass_at_k", "best_at_k", "maj_at_k")


def mean_over_benchmarks(
    entries: Mapping[str, Entry], *, samples: int, success_threshold: float, ks: Sequence[int], seed: int
) -> dict[str, Any] | None:
    """The plain mean of every figure: each benchmark counts alike, whatever its size.

    Intervals take the benchmarks as given and the problems within each as drawn.

    Args:
        entries: of ``evaluation.json``, by label; those of other samples, ks or threshold are left out.
        samples: responses a problem.
        success_threshold: of a correct response.
        ks: of pass@k and its kin.
        seed: of the bootstrap.

    Returns:
        As JSON values, with the labels that were averaged; None where there is none.
    """
    wanted = {"samples": samples, "success_threshold": success_threshold}
    found = {
        label: entry
        for label, entry in entries.items()
        if has_figures(entry)
        and all(entry[name] == wanted[name] for name in COMPARABLE)
        and set(entry["pass_at_k"]) == {str(k) for k in ks}
    }
    if not found:
        return None
    by_k = [name for name in BY_K if all(entry[name] is not None for entry in found.values())]
    places = [("mean_at_k", None), ("mean_reward", None), *((name, k) for name in by_k for k in ks)]
    tables = [[[_of_problem(p, *place) for place in places] for p in e["problems"]] for e in found.values()]
    intervals = dict(zip(places, mean_intervals(tables, seed=seed), strict=True))
    return {
        "benchmarks": list(found),
        "num_benchmarks": len(found),
        "mean_at_k": as_json(intervals["mean_at_k", None]),
        "mean_reward": as_json(intervals["mean_reward", None]),
        **{name: {str(k): as_json(intervals[name, k]) for k in ks} if name in by_k else None for name in BY_K},
    }


def as_json(interval: Interval) -> dict[str, float]:
    """An interval as ``evaluation.json`` has it."""
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _of_problem(problem: Mapping[str, Any], name: str, k: int | None) -> float:
    return float(problem[name] if k is None else problem[name][str(k)])
