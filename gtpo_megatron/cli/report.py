"""``gtpo-megatron report``."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE

PAGE = "report.html"


@configuration
class ReportOptions:
    """Options of ``report``.

    Attributes:
        runs: run folders, or a folder of run folders; several runs are drawn side by side.
        output: file to write; empty means ``report.html`` in the run's folder, and for several runs where you stand,
            if there is none yet.
        parquet: file for the sampled responses as a table, one row per response; empty means none.
        dollars_per_gpu_hour: price of a GPU and hour, for the cost of each run; 0 means that no cost is shown.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    output: str = field(default="")
    parquet: str = field(default="")
    dollars_per_gpu_hour: float = 0.0


def run(arguments: Sequence[str]) -> int:
    """``report RUN ...``."""
    from gtpo_megatron.companions.report.page import write_report
    from gtpo_megatron.companions.report.response_table import write_responses

    options = parse_options(ReportOptions, arguments, program="gtpo-megatron report")
    folders = [folder for name in options.runs for folder in _runs_in(Path(name))]
    if not folders:
        raise ConfigError("report needs at least one run folder")
    price = checked_price(options.dollars_per_gpu_hour)
    page = Path(options.output) if options.output else _own_page(folders)
    _write("--output", page, lambda: write_report(folders, page, dollars_per_gpu_hour=price))
    if options.parquet:
        table = Path(options.parquet)
        _write("--parquet", table, lambda: write_responses(folders, table))
    return 0


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it if it is none."""
    if not folder.is_dir() or (folder / "config.yaml").exists() or (folder / METRICS_FILE).exists():
        return [folder]
    return sorted(run for run in folder.iterdir() if (run / METRICS_FILE).is_file()) or [folder]


def _own_page(folders: Sequence[Path]) -> Path:
    """Where the page goes if nobody says: the page of one run is that run's.

    Raises:
        ConfigError: a page of several runs would replace another page.
    """
    if len(folders) == 1:
        return folders[0] / PAGE
    if (page := Path(PAGE)).exists():
        raise ConfigError(f"{page} exists and is kept; name another file, or this one, with --output FILE")
    return page


def checked_price(dollars_per_gpu_hour: float) -> float | None:
    """The price of a GPU and hour; None for 0.

    Raises:
        ConfigError: it is no price.
    """
    if dollars_per_gpu_hour < 0:
        raise ConfigError(f"--dollars-per-gpu-hour {dollars_per_gpu_hour:g} is no price; give 0 or more")
    return dollars_per_gpu_hour or None


def _write(option: str, path: Path, write: Callable[[], object]) -> None:
    """Writes a file and prints its name.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; give a file to write, such as {path / 'report.html'}")
        write()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written ({error}); choose another file with {option}") from error
    sys.stdout.write(f"{path}\n")


COMMAND = Command(
    usage="""\
  report RUN ... [--parquet FILE] [--dollars-per-gpu-hour X]
                    draws one page from one or several run folders, or a folder of them, with their cost;
                    writes the sampled responses as a table""",
    run=run,
    options=ReportOptions,
)
