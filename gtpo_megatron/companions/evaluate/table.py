"""The table of results on a terminal."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from gtpo_megatron.companions.evaluate.results import BenchmarkResult, EvaluationResult
from gtpo_megatron.companions.evaluate.scores import REWARD
from gtpo_megatron.evaluation.intervals import Interval
from gtpo_megatron.untrusted.text import printable


def results_table(result: EvaluationResult, *, samples: int, ks: Sequence[int], title: str) -> Table:
    """One line per benchmark, in percent, and one for their mean if there are several.

    Columns: mean@k with its 95% interval, pass@k for a middle and the greatest k, best@k and maj@k for the greatest k,
    and the mean reward if it differs from mean@k.

    Args:
        result: the evaluation's result.
        samples: responses per problem.
        ks: the ks of the figures, ascending.
        title: the table's title.
    """
    mean = f"mean@{samples}"
    shown = ks if len(ks) <= 2 else (ks[len(ks) // 2], ks[-1])  # pass@1 is mean@k
    scored = [one.scores.intervals for one in result.benchmarks if one.scores is not None]
    rewards = [REWARD] if any(figures[REWARD] != figures[mean] for figures in scored) else []
    others = [*(f"pass@{k}" for k in shown), f"best@{ks[-1]}", f"maj@{ks[-1]}"]

    def cells(figures: Mapping[str, Interval]) -> list[str]:
        whole = figures[mean]
        return [
            _percent(whole.mean),
            f"{_percent(whole.low)}-{_percent(whole.high)}",
            *(f"{figures[name].mean:.3f}" for name in rewards),
            *(_percent(figures[name].mean) if name in figures else "-" for name in others),
        ]

    table = Table(title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("benchmark", no_wrap=True)
    for name in ("problems", mean, "95%", *rewards, *others, "tokens", "cut", "failed"):
        table.add_column(name, justify="right")
    for one in result.benchmarks:
        row: list[str] = []
        if one.scores is not None:
            counts = [f"{one.scores.response_tokens_mean:.0f}", _percent(one.scores.truncated_frac)]
            row = [*cells(one.scores.intervals), *counts, str(one.scores.num_failed)]
        table.add_row(_label(one), _problems(one), *row)
    if result.num_averaged > 1:
        table.add_section()
        table.add_row(f"mean of {result.num_averaged}", "", *cells(result.mean))
    return table


def _label(one: BenchmarkResult) -> Text:
    return Text(f"{printable(one.label)}{' (earlier)' if one.is_earlier else ''}")


def _problems(one: BenchmarkResult) -> str:
    is_whole = one.num_complete == one.num_problems
    return str(one.num_problems) if is_whole else f"{one.num_complete} of {one.num_problems}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
