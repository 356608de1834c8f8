"""How far an evaluation is: bars on a terminal, a line a minute elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtpo_megatron.evaluation.benchmark_run import Benchmark
from gtpo_megatron.evaluation.response_file import GradedResponse
from gtpo_megatron.observability.correctness import are_correct

LINE_EVERY_S = 60.0


class EvaluationDisplay:
    """One bar a benchmark, with the share of correct responses so far.

    Args:
        benchmarks: in the order of the bars.
        samples: responses a problem.
        threshold: a response is correct where its reward is at least this.
        console: where to draw.
    """

    def __init__(self, benchmarks: Sequence[Benchmark], *, samples: int, threshold: float, console: Console) -> None:
        self._console = console
        self._threshold = threshold
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("responses, {task.fields[correct]} correct"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._done: dict[str, int] = {}
        self._correct: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._tasks = {}
        for benchmark in benchmarks:
            label = benchmark.label
            # what has no verdict is still to be done: it is graded again
            there = [response for response in benchmark.present(samples) if response.failure is None]
            total = samples * len(benchmark.problems.problems)
            self._total[label] = total
            self._done[label] = len(there)
            self._correct[label] = sum(self._is_correct(response) for response in there)
            self._tasks[label] = self._progress.add_task(
                label, total=total, completed=self._done[label], correct=self._share(label)
            )
        self._next_line = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> "EvaluationDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def response_done(self, benchmark: Benchmark, response: GradedResponse) -> None:
        """One more."""
        label = benchmark.label
        self._done[label] += 1
        self._correct[label] += self._is_correct(response)
        self._progress.update(self._tasks[label], completed=self._done[label], correct=self._share(label))
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            shares = (
                f"{name} {self._done[name]}/{self._total[name]}, {self._share(name)} correct" for name in self._done
            )
            self._console.print("; ".join(shares), highlight=False, soft_wrap=True)

    def _is_correct(self, response: GradedResponse) -> bool:
        return response.failure is None and bool(are_correct(response.reward, threshold=self._threshold))

    def _share(self, label: str) -> str:
        return f"{100 * self._correct[label] / self._done[label]:.1f}%" if self._done[label] else "-"
