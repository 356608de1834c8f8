"""The results on a screen."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from gtpo_megatron.evaluation.benchmark_run import Benchmark
from gtpo_megatron.evaluation.scores import Scores

SHOWN_KS = 2


def results_table(
    benchmarks: Sequence[Benchmark],
    scores: Mapping[str, Scores],
    *,
    samples: int,
    title: str,
    mean: Mapping[str, Any] | None = None,
) -> Table:
    """A line a benchmark, in percent, and a line for their mean where there are several.

    mean@k with its 95% interval; of the other ks the greatest, and for pass@k one more; the mean reward where it is not
    mean@k. The file has all of them, with their intervals.

    Args:
        benchmarks: in order.
        scores: by label.
        samples: responses a problem.
        title: of the table.
        mean: as ``mean_over_benchmarks`` has it; it may count benchmarks that were measured earlier.
    """
    ks = _shown(
        [*(k for found in scores.values() for k in found.pass_at_k), *map(int, mean["pass_at_k"] if mean else ())]
    )
    has_rewards = any(found.mean_reward != found.mean_at_k for found in scores.values())
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("benchmark", no_wrap=True)
    names = ["problems", f"mean@{samples}", "95%", *(["reward"] if has_rewards else [])]
    names += [*(f"pass@{k}" for k in ks), *(f"{name}@{k}" for name in ("best", "maj") for k in ks[-1:])]
    for name in (*names, "tokens", "cut", "failed"):
        table.add_column(name, justify="right")
    for benchmark in benchmarks:
        found = scores.get(benchmark.label)
        table.add_row(benchmark.label, _problems(benchmark, samples), *_row(found, ks, has_rewards=has_rewards))
    if mean is not None and mean["num_benchmarks"] > 1:
        table.add_section()
        table.add_row(f"mean of {mean['num_benchmarks']}", "", *_mean_row(mean, ks, has_rewards=has_rewards))
    table.caption = None if mean is None else _caption(mean, scores)
    return table


def _caption(mean: Mapping[str, Any], scores: Mapping[str, Scores]) -> str | None:
    """What the mean is of, where the lines of the table do not show it."""
    parts = []
    if mean["num_benchmarks"] > 1 and any(label not in scores for label in mean["benchmarks"]):
        counts = (
            f"{label} ({num} problems{'' if label in scores else ', measured earlier'})"
            for label, num in mean["num_problems"].items()
        )
        parts.append(f"the mean counts {', '.join(counts)}")
    if mean["left_out"]:
        reasons = (f"{label} ({reason})" for label, reason in mean["left_out"].items())
        parts.append(f"measured earlier and left out of the mean: {', '.join(reasons)}")
    return "; ".join(parts) or None


def _problems(benchmark: Benchmark, samples: int) -> str:
    num_all = len(benchmark.problems.problems)
    num_complete = len(benchmark.complete(samples))
    return str(num_all) if num_complete == num_all else f"{num_complete} of {num_all}"


def _row(scores: Scores | None, ks: Sequence[int], *, has_rewards: bool) -> list[str]:
    if scores is None:
        return []
    majority = scores.maj_at_k
    return [
        _percent(scores.mean_at_k.mean),
        _range(scores.mean_at_k.low, scores.mean_at_k.high),
        *([f"{scores.mean_reward.mean:.3f}"] if has_rewards else []),
        *(_percent(scores.pass_at_k[k].mean) for k in ks),
        _percent(scores.best_at_k[ks[-1]].mean),
        "-" if majority is None else _percent(majority[ks[-1]].mean),
        f"{scores.response_tokens_mean:.0f}",
        _percent(scores.truncated_frac),
        str(scores.num_failed),
    ]


def _mean_row(mean: Mapping[str, Any], ks: Sequence[int], *, has_rewards: bool) -> list[str]:
    whole, majority = mean["mean_at_k"], mean["maj_at_k"]
    return [
        _percent(whole["mean"]),
        _range(whole["low"], whole["high"]),
        *([f"{mean['mean_reward']['mean']:.3f}"] if has_rewards else []),
        *(_percent(mean["pass_at_k"][str(k)]["mean"]) for k in ks),
        _percent(mean["best_at_k"][str(ks[-1])]["mean"]),
        "-" if majority is None else _percent(majority[str(ks[-1])]["mean"]),
    ]


def _shown(ks: Sequence[int]) -> list[int]:
    """The greatest, and one in the middle; pass@1 is mean@k."""
    distinct = sorted(set(ks))
    return distinct if len(distinct) <= SHOWN_KS else [distinct[len(distinct) // 2], distinct[-1]]


def _range(low: float, high: float) -> str:
    return f"{_percent(low)}-{_percent(high)}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
