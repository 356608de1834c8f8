"""Progress of an evaluation: bars on a terminal, otherwise one line per minute."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtpo_megatron.companions.evaluate.benchmark_run import WantedResponse
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, VerdictFile
from gtpo_megatron.observability.correctness import are_correct
from gtpo_megatron.sentence import print_sentence

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
