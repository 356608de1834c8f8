"""``gtpo-megatron sft``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gtpo_megatron.cli.command import Command, require_libraries
from gtpo_megatron.cli.reader import output_may_be_lost
from gtpo_megatron.cli.recipe import SftRecipeOptions, parse
from gtpo_megatron.cli.train import leave_report
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED
from gtpo_megatron.sentence import print_sentence

if TYPE_CHECKING:
    from gtpo_megatron.config.sft import SftConfig
    from gtpo_megatron.orchestration.loop.supervised import SftSummary


@configuration
class SftOptions(SftRecipeOptions):
    """Options of ``sft`` besides the recipe's fields.

    Attributes:
        run_dir: folder of the warm start; empty means ``runs/<name>``.
        resume: go on from the folder's last checkpoint.
    """

    run_dir: str = ""
    resume: bool = False


def run(arguments: Sequence[str]) -> int:
    """``sft RECIPE ...``; status 75 if it was asked to stop and is saved."""
    options = parse("sft", SftOptions, arguments)
    require_libraries("torch", "megatron.core", command="sft")
    from gtpo_megatron.sft import sft  # takes seconds, so options are parsed first

    console = Console()
    run_dir = Path(options.run_dir or f"runs/{options.config.name}")
    with output_may_be_lost():
        summary = sft(options.config, run_dir=run_dir, resume=options.resume, console=console)
        return _say_how_it_ended(summary, options.config, run_dir, leave_report(run_dir), console)


def _say_how_it_ended(
    summary: "SftSummary", config: "SftConfig", run_dir: Path, report: Path | None, console: Console
) -> int:
    """Prints it, and how to go on; returns the exit status."""
    if summary.stopped_after is not None:
        where = f"after step {summary.stopped_after}, saved" if summary.stopped_after else "before the first step"
        print_sentence(console, f"stopped {where} ({summary.stop_reason}); --resume goes on")
        return EXIT_STOPPED
    losses = [f"{loss:.4f}" for loss in (summary.before, summary.after) if loss is not None]
    if losses:
        print_sentence(console, f"held-out loss: {' -> '.join(losses)} nats per token")
    if report is not None:
        print_sentence(console, f"report: {report}")
    if config.checkpoint.export_hf:
        print_sentence(console, f"to go on: gtpo-megatron train RECIPE --model.path {run_dir / 'hf'}")
    if config.checkpoint.export_hf and config.adapter.is_on:
        adapter = config.adapter
        scaling = "" if adapter.scaling == "rank" else f" --adapter.scaling {adapter.scaling}"
        print_sentence(
            console,
            f"or, to go on with the adapters: gtpo-megatron train RECIPE --adapter.path {run_dir / 'adapter'} "
            f"--adapter.rank {adapter.rank} --adapter.alpha {adapter.alpha:g}{scaling}",
        )
    return 0


COMMAND = Command(
    usage="""\
  sft RECIPE [--run-dir DIR] [--resume] [--num-steps N] [--any.field VALUE ...]
                    a warm start: trains on given conversations, so that train goes on
                    from its folder; RECIPE is one of its own, such as recipes.tiny_cpu:sft""",
    run=run,
    options=SftOptions,
    interrupted="--resume goes on from the last checkpoint",
)
