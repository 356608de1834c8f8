"""The part of ``gtpo-megatron convert`` that needs torch: which checkpoint is meant, and a bar during conversion."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gtpo_megatron.config.serialize import load_any
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.folder import CONFIG_FILE, RunFolder
from gtpo_megatron.weights.conversion import ConversionProgress
from gtpo_megatron.weights.megatron.checkpoint_files import Verify, converted_weights, is_checkpoint


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


def find_checkpoint(source: Path, model: Path | None, verify: Verify = "full") -> tuple[Path, Path]:
    """The Megatron checkpoint that a folder holds or is, and the folder with its model's configuration.

    Args:
        source: a converted folder, a run's folder (its latest checkpoint) or one checkpoint of a run.
        model: folder with config.json and tokenizer; None: the converted folder, or the ``model.path`` of the run.
        verify: check of a run's checkpoints before one is chosen.

    Raises:
        ConfigError: neither a converted folder, nor a run's, nor a checkpoint of one; or of a model nobody names.
    """
    converted = converted_weights(source)
    if converted is not None:
        return converted, model or source
    if (source / CONFIG_FILE).is_file():
        latest = RunFolder(source).checkpoints.latest(verify)
        if latest is None:
            raise ConfigError(f"{source} is the folder of a run without a finished checkpoint; wait for its first")
        if latest.note:
            logging.getLogger(__name__).warning(latest.note)
        return latest.path, model or Path(load_any(source / CONFIG_FILE).model.path)
    if not is_checkpoint(source):
        raise ConfigError(
            f"{source} holds no Megatron checkpoint; expected a converted folder (megatron/ in it), a run's folder "
            f"(config.yaml and checkpoints/ in it) or checkpoints/step_N of one"
        )
    config = source.resolve().parent.parent / CONFIG_FILE
    if model is None and not config.is_file():
        raise ConfigError(
            f"{source} is a checkpoint outside its run's folder, so its model is not known; "
            f"name a folder with config.json and tokenizer by --model"
        )
    return source, model or Path(load_any(config).model.path)
