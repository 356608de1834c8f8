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


@configuration
class ReportOptions:
    """Options of ``report``.

    Attributes:
        runs: run folders; several are drawn side by side.
        output: file to write; empty means ``report.html`` in the first folder.
        parquet: file for the sampled responses as a table, one row per response; empty means none.
        dollars_per_gpu_hour: price of a GPU and hour, for the cost of each run; 0 means that no cost is shown.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    output: str = field(default="")
    parquet: str = field(default="")
    dollars_per_gpu_hour: float = 0.0


def run(arguments: Sequence[str]) -> int:
    """``report RUN ...``."""
    from gtpo_megatron.companions.report.page import write_report
    from gtpo_megatron.companions.report.response_table import write_responses

    options = parse_options(ReportOptions, arguments, program="gtpo-megatron report")
    folders = [Path(name) for name in options.runs]
    if not folders:
        raise ConfigError("report needs at least one run folder")
    price = checked_price(options.dollars_per_gpu_hour)
    page = Path(options.output) if options.output else folders[0] / "report.html"
    _write("--output", page, lambda: write_report(folders, page, dollars_per_gpu_hour=price))
    if options.parquet:
        table = Path(options.parquet)
        _write("--parquet", table, lambda: write_responses(folders, table))
    return 0


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
                    draws one page from one or several run folders, with their cost; writes the sampled
                    responses as a table""",
    run=run,
    options=ReportOptions,
)
