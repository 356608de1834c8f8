"""``gtpo-megatron train``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gtpo_megatron.cli.command import Command, require_libraries
from gtpo_megatron.cli.reader import output_may_be_lost
from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.companions.health.signs import assess, in_one_line
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.cycle_collector import without_collections
from gtpo_megatron.orchestration.on_ray.worker_servers import worker_servers
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_what_there_is
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED
from gtpo_megatron.sentence import print_sentence

if TYPE_CHECKING:
    from gtpo_megatron.orchestration.loop.controller import RunSummary

logger = logging.getLogger(__name__)


@configuration
class TrainOptions(RecipeOptions):
    """Options of ``train`` besides the recipe's fields.

    Attributes:
        run_dir: folder of the run; empty means ``runs/<name>``.
        resume: go on from the folder's last checkpoint.
    """

    run_dir: str = ""
    resume: bool = False


def run(arguments: Sequence[str]) -> int:
    """``train RECIPE ...``."""
    return train(parse("train", TrainOptions, arguments), command="train")


def train(options: TrainOptions, *, command: str) -> int:
    """Trains, and prints how it ended.

    Args:
        options: a recipe with its overrides.
        command: name of the command, for errors.

    Returns:
        Status 0; 75 for a run that was asked to stop and is saved.
    """
    require_libraries("torch", "megatron.core", "vllm", command=command)
    console = Console()
    run_dir = Path(options.run_dir or f"runs/{options.config.name}")
    with output_may_be_lost(), worker_servers(options.config) as servers:
        with without_collections():
            from gtpo_megatron import train as training  # takes seconds, in which the servers import too

        summary = training.train(
            options.config, run_dir=run_dir, resume=options.resume, console=console, servers=servers
        )
        return _say_how_it_ended(summary, run_dir, leave_report(run_dir), console)


def leave_report(run_dir: Path) -> Path | None:
    """Writes the page of a run that has ended; a failure is only a warning, and so is a signal: it ends the page.

    Returns:
        The file; None after a failure.
    """
    from gtpo_megatron.companions.report.page import write_report  # plotly takes a second

    file = run_dir / "report.html"
    try:
        write_report([run_dir], file)
    except (Exception, KeyboardInterrupt) as error:  # any error, also our own bugs: the run itself is complete
        logger.warning(
            "the report was not written (%s: %s); to make it later: gtpo-megatron report %s",
            type(error).__name__,
            error,
            run_dir,
            exc_info=not isinstance(error, OSError | KeyboardInterrupt),
        )
        return None
    return file


def _say_how_it_ended(summary: "RunSummary", run_dir: Path, report: Path | None, console: Console) -> int:
    """Prints it; returns the exit status."""
    for result in summary.before or ():
        print_sentence(console, f"before: {result}")
    if summary.stopped_after is not None:
        if summary.stopped_after == 0:
            print_sentence(console, f"stopped before the first step ({summary.stop_reason}); --resume begins it")
        else:
            print_sentence(
                console, f"stopped after step {summary.stopped_after} ({summary.stop_reason}), saved; --resume goes on"
            )
        return EXIT_STOPPED
    for result in summary.after or ():
        print_sentence(console, f"after:  {result}")
    if (run_dir / METRICS_FILE).exists():
        rows, _ = read_what_there_is(run_dir / METRICS_FILE)
        print_sentence(console, f"health: {in_one_line(assess(rows))}")
    if report is not None:
        print_sentence(console, f"report: {report}")
    return 0


COMMAND = Command(
    usage="""\
  train RECIPE [--run-dir DIR] [--resume] [--num-steps N] [--any.field VALUE ...]
                    trains; RECIPE is module:function, such as recipes.tiny_cpu:gtpo,
                    or FILE.py:function, or the config.yaml of a run""",
    run=run,
    options=TrainOptions,
    interrupted="--resume goes on from the last checkpoint",
)
