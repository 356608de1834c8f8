"""``gtpo-megatron report``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of ``report``.

    Attributes:
        runs: run folders; several are drawn side by side.
        output: file to write; empty means ``report.html`` in the first folder.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    output: str = field(default="")


def run(arguments: Sequence[str]) -> int:
    """``report RUN ...``."""
    from gtpo_megatron.report.page import write_report

    options = parse_options(ReportOptions, arguments, program="gtpo-megatron report")
    folders = [Path(name) for name in options.runs]
    if not folders:
        raise ConfigError("report needs at least one run folder")
    output = Path(options.output) if options.output else folders[0] / "report.html"
    try:
        if output.is_dir():
            raise ConfigError(f"--output {output} is a folder; give a file to write, such as {output / 'report.html'}")
        write_report(folders, output)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error}); choose another file with --output"
        ) from error
    sys.stdout.write(f"{output}\n")
    return 0


COMMAND = Command(
    usage="  report RUN ...    draws one page from one or several run folders",
    run=run,
    options=ReportOptions,
)
