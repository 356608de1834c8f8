"""Converts models between Hugging Face folders and Megatron checkpoints; docs/conversion.md shows how.

``python tools/convert_checkpoint.py hf-to-megatron SRC DST`` and ``... megatron-to-hf SRC DST``.
"""

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.checks import require_positive
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.weights.conversion import ConversionProgress, converted_weights, hf_to_megatron, megatron_to_hf
from gtpo_megatron.weights.megatron.checkpoint_files import Verify
from gtpo_megatron.weights.megatron.reader import is_checkpoint


@dataclass(frozen=True, kw_only=True)
class HFToMegatron:
    """Makes a folder that the trainer can start from: a Megatron checkpoint with configuration and tokenizer.

    Attributes:
        src: folder in Hugging Face format, with safetensors.
        dst: folder to make; must not exist, or be empty.
        tensor_parallel_size: of the ranks that will load it; any other layout can load it too.
        pipeline_parallel_size: of the ranks that will load it; any other layout can load it too.
        expert_parallel_size: of the ranks that will load it; any other layout can load it too.
        expert_tensor_parallel_size: of the ranks that will load it; any other layout can load it too.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        require_positive(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )

    def _parallel(self) -> ParallelConfig:
        tensor, expert = self.tensor_parallel_size, self.expert_parallel_size * self.expert_tensor_parallel_size
        return ParallelConfig(
            num_ranks=math.lcm(tensor, expert) * self.pipeline_parallel_size,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=self.pipeline_parallel_size,
            sequence_parallel=tensor > 1,
            expert_parallel_size=self.expert_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
        )

    def run(self, console: Console) -> None:
        """Converts."""
        with _progress_bar(console) as bar:
            hf_to_megatron(self.src, self.dst, self._parallel(), progress=bar)


@dataclass(frozen=True, kw_only=True)
class MegatronToHF:
    """Makes a folder in Hugging Face format.

    Attributes:
        src: a converted folder, a run's folder (its latest checkpoint) or one checkpoint of a run.
        dst: folder to make; must not exist, or be empty.
        shard_mib: size of the largest safetensors file.
        model: folder that config.json and tokenizer are taken from; by default the converted folder itself, or the
            ``model.path`` of the run.
        verify: check the checkpoint's files against its manifest first; a converted folder has none.
    """

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    shard_mib: int = 5120
    model: Path | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        require_positive(shard_mib=self.shard_mib)

    def run(self, console: Console) -> None:
        """Converts."""
        verify: Verify = "full" if self.verify else "none"
        checkpoint, model = find_checkpoint(self.src, self.model, verify)
        with _progress_bar(console) as bar:
            megatron_to_hf(checkpoint, model, self.dst, progress=bar, shard_bytes=self.shard_mib << 20, verify=verify)


Command = (
    Annotated[HFToMegatron, tyro.conf.subcommand("hf-to-megatron")]
    | Annotated[MegatronToHF, tyro.conf.subcommand("megatron-to-hf")]
)


def find_checkpoint(source: Path, model: Path | None, verify: Verify = "full") -> tuple[Path, Path]:
    """The Megatron checkpoint that a folder holds or is, and the folder with its model's configuration.

    Raises:
        ConfigError: neither a converted folder, nor a run's, nor a checkpoint of one; or of a model nobody names.
    """
    converted = converted_weights(source)
    if converted is not None:
        return converted, model or source
    if (source / "config.yaml").is_file():
        latest = RunFolder(source).checkpoints.latest(verify)
        if latest is None:
            raise ConfigError(f"{source} is the folder of a run without a finished checkpoint; wait for its first")
        if latest.note:
            logging.getLogger(__name__).warning(latest.note)
        return latest.path, model or Path(load_config(source / "config.yaml").model.path)
    if not is_checkpoint(source):
        raise ConfigError(
            f"{source} holds no Megatron checkpoint; expected a converted folder (megatron/ in it), a run's folder "
            f"(config.yaml and checkpoints/ in it) or checkpoints/step_N of one"
        )
    config = source.resolve().parent.parent / "config.yaml"
    if model is None and not config.is_file():
        raise ConfigError(
            f"{source} is a checkpoint outside its run's folder, so its model is not known; "
            f"name a folder with config.json and tokenizer by --model"
        )
    return source, model or Path(load_config(config).model.path)


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
def _progress_bar(console: Console) -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        yield _Bar(progress)


def main(arguments: list[str] | None = None) -> int:
    """Runs one conversion; errors are printed as one line."""
    sys.path.insert(0, str(Path.cwd()))  # a run's configuration may name a module of the user
    console = Console(stderr=True)
    given = sys.argv[1:] if arguments is None else arguments
    command = options_or_exit(Command, given, program="convert_checkpoint.py", description=__doc__)
    try:
        command.run(console)
    except (GTPOError, OSError) as error:
        console.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", soft_wrap=True, highlight=False)
        return 1
    console.print(f"{escape(str(command.dst))} is written", soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_time=False, show_path=False)],
    )
    sys.exit(main())
