"""``gtpo-megatron preflight``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.companions.planner.hardware import GPUName
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.sentence import print_sentence

EXIT_FAILED = 1


@configuration
class PreflightCommandOptions(RecipeOptions):
    """Options of ``preflight`` besides the recipe's fields.

    Attributes:
        output: folder of the report, on the disk of the run; empty means ``runs/<name>/preflight``.
        only: make these checks and what they need.
        skip: leave these checks out.
        seconds: time limit of all checks.
        gpu: kind of GPU, for expected figures, where its own name does not say it.
    """

    output: str = ""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seconds: float = 600.0
    gpu: GPUName | None = None


def run(arguments: Sequence[str]) -> int:
    """``preflight RECIPE ...``; status 1 unless all has passed."""
    options = parse("preflight", PreflightCommandOptions, arguments)
    from gtpo_megatron.companions.preflight.run import PAGE_FILE, PreflightOptions, preflight  # takes seconds

    console = Console()
    output = Path(options.output or f"runs/{options.config.name}/preflight")
    report = preflight(
        options.config,
        PreflightOptions(output=output, only=options.only, skip=options.skip, seconds=options.seconds, gpu=options.gpu),
        console,
    )
    print_sentence(
        console,
        f"{'passed' if report.has_passed else 'FAILED'} in {report.seconds:.0f} s: {report.summary}; "
        f"report: {output / PAGE_FILE}",
    )
    return 0 if report.has_passed else EXIT_FAILED


COMMAND = Command(
    usage="""\
  preflight RECIPE [--output DIR] [--only NAME ...] [--skip NAME ...] [--seconds S] [--any.field VALUE ...]
                    checks the machines, the layout and one step before a run is paid for, ten minutes at most;
                    status 0 if all has passed""",
    run=run,
    options=PreflightCommandOptions,
)
