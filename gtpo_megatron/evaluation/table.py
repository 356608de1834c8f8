"""The results on a screen."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from gtpo_megatron.evaluation.benchmark_run import Benchmark
from gtpo_megatron.evaluation.metrics import Interval
from gtpo_megatron.evaluation.scores import Scores

SHOWN_KS = 2


def results_table(benchmarks: Sequence[Benchmark], scores: Mapping[str, Scores], *, samples: int, title: str) -> Table:
    """A line a benchmark, in percent, and their plain mean where there are several.

    mean@k with its 95% interval; of the other ks the greatest, and for pass@k one more. The file has all of them, with
    their intervals.
    """
    ks = _shown([k for found in scores.values() for k in found.pass_at_k])
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("benchmark", no_wrap=True)
    names = ["problems", f"mean@{samples}", "95%", *(f"pass@{k}" for k in ks), *(f"best@{k}" for k in ks[-1:])]
    for name in (*names, *(f"maj@{k}" for k in ks[-1:]), "tokens", "cut", "failed"):
        table.add_column(name, justify="right")
    for benchmark in benchmarks:
        table.add_row(benchmark.label, *_row(benchmark, scores.get(benchmark.label), ks, samples))
    if len(scores) > 1:
        found = list(scores.values())
        table.add_section()
        table.add_row(
            "mean",
            "",
            _mean([s.mean_at_k for s in found]),
            "",
            *(_mean([s.pass_at_k[k] for s in found]) for k in ks),
            _mean([s.best_at_k[ks[-1]] for s in found]),
            _mean([s.maj_at_k[ks[-1]] for s in found if s.maj_at_k is not None]),
        )
    return table


def _row(benchmark: Benchmark, scores: Scores | None, ks: Sequence[int], samples: int) -> list[str]:
    num_all = len(benchmark.problems.problems)
    num_complete = len(benchmark.complete(samples))
    problems = str(num_all) if num_complete == num_all else f"{num_complete} of {num_all}"
    if scores is None:
        return [problems]
    majority = scores.maj_at_k
    return [
        problems,
        _percent(scores.mean_at_k.mean),
        f"{_percent(scores.mean_at_k.low)}-{_percent(scores.mean_at_k.high)}",
        *(_percent(scores.pass_at_k[k].mean) for k in ks),
        _percent(scores.best_at_k[ks[-1]].mean),
        "-" if majority is None else _percent(majority[ks[-1]].mean),
        f"{scores.response_tokens_mean:.0f}",
        _percent(scores.truncated_frac),
        str(scores.num_failed),
    ]


def _shown(ks: Sequence[int]) -> list[int]:
    """The greatest, and one in the middle; pass@1 is mean@k."""
    distinct = sorted(set(ks))
    return distinct if len(distinct) <= SHOWN_KS else [distinct[len(distinct) // 2], distinct[-1]]


def _mean(intervals: Sequence[Interval]) -> str:
    return _percent(sum(interval.mean for interval in intervals) / len(intervals)) if intervals else "-"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
