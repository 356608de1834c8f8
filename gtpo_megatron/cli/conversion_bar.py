"""The progress bar of a conversion."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gtpo_megatron.weights.conversion import ConversionProgress


class _Bar(ConversionProgress):
    """Rich's bar, as conversions report to it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("checking", total=None)

    def start(self, num_bytes: int) -> None:
        """Starts the bar after the checks."""
        self._progress.update(self._task, description="converting", total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        """Advances the bar."""
        self._progress.advance(self._task, num_bytes)


@contextmanager
def progress_bar(console: Console) -> Iterator[ConversionProgress]:
    """Shows a bar until the conversion is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        yield _Bar(progress)
