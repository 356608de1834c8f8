"""An evaluation on a terminal: bars, or one line per minute where there is none, and the table of results."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gtpo_megatron.companions.evaluate.benchmark_run import WantedResponse
from gtpo_megatron.companions.evaluate.results import BenchmarkResult, EvaluationResult
from gtpo_megatron.companions.evaluate.scores import REWARD, are_correct
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, VerdictFile
from gtpo_megatron.evaluation.intervals import Interval
from gtpo_megatron.sentence import print_sentence
from gtpo_megatron.untrusted.text import printable

LINE_EVERY_S = 60.0


class EvaluationDisplay(Progress):
    """One bar per benchmark, with the fraction of correct responses so far.

    Args:
        wanted: every response of the evaluation.
        file: the file of verdicts, which may have some.
        threshold: a response is correct if its reward is at least this.
        console: the output.
    """

    def __init__(
        self,
        wanted: Sequence[WantedResponse],
        file: VerdictFile,
        *,
        threshold: float,
        console: Console,
    ) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("responses, {task.fields[correct]} correct"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._threshold = threshold
        self._total = Counter(one.benchmark for one in wanted)
        self._done: Counter[str] = Counter()
        self._correct: Counter[str] = Counter()
        for one in wanted:
            if file.has_verdict(one.key):
                self._count(file.verdicts[one.key])
        self._bars = {
            label: self.add_task(label, total=total, completed=self._done[label], correct=self._share(label))
            for label, total in self._total.items()
        }
        self._next_line = time.monotonic() + LINE_EVERY_S

    def verdict_given(self, response: GradedResponse) -> None:
        """Updates the display after a verdict."""
        label = response.benchmark
        self._count(response)
        self.update(self._bars[label], completed=self._done[label], correct=self._share(label))
        if not self.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            shares = (f"{one} {self._done[one]}/{num}, {self._share(one)} correct" for one, num in self._total.items())
            print_sentence(self.console, "; ".join(shares))

    def _count(self, response: GradedResponse) -> None:
        self._done[response.benchmark] += 1
        is_correct = response.failure is None and bool(are_correct(response.reward, threshold=self._threshold))
        self._correct[response.benchmark] += is_correct

    def _share(self, label: str) -> str:
        return f"{100 * self._correct[label] / self._done[label]:.1f}%" if self._done[label] else "-"


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
