"""``gtpo-megatron verify-resume``."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.config.configuration import configuration


@configuration
class VerifyResumeOptions(RecipeOptions):
    """Options of ``verify-resume`` besides the recipe's fields.

    Attributes:
        steps: steps per scratch run.
        kill_after: kill the second scratch run once the checkpoint of this step is complete.
        output: folder for the scratch runs; empty means ``verify-resume`` in the run folder, or beside the runs.
        keep: keep the scratch runs even if they are equal.
        verify: check the checkpoints' files against their manifests before comparing.
    """

    steps: int = 4
    kill_after: int = 2
    output: str = ""
    keep: bool = False
    verify: bool = True


def run(arguments: Sequence[str]) -> int:
    """``verify-resume RUN ...``."""
    folder = Path(arguments[0]) if arguments and Path(arguments[0]).is_dir() else None
    if folder is not None:
        arguments = [str(folder / "config.yaml"), *arguments[1:]]
    options = parse("verify-resume", VerifyResumeOptions, arguments)
    from gtpo_megatron.companions.verify_resume.verify import (  # takes seconds, so options are parsed first
        show,
        verify_resume,
    )

    default = folder / "verify-resume" if folder is not None else Path("runs") / f"{options.config.name}.verify-resume"
    console = Console()
    results = verify_resume(
        options.config,
        output=Path(options.output) if options.output else default,
        num_steps=options.steps,
        kill_after=options.kill_after,
        keep=options.keep,
        verify="full" if options.verify else "none",
        console=console,
    )
    return 0 if show(results, console, is_continuous=options.config.rollout.is_continuous) else 1


COMMAND = Command(
    usage="""\
  verify-resume RUN [--steps N] [--kill-after K] [--output DIR] [--keep] [--any.field VALUE ...]
                    proves that a run which is killed and resumed equals an unbroken one, bit for bit;
                    RUN is a run folder, a config.yaml or a recipe""",
    run=run,
    options=VerifyResumeOptions,
)
