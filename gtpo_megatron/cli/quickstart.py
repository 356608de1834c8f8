"""``gtpo-megatron quickstart``: the tiny model learns arithmetic on two CPU cores; docs/quickstart.md."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import parse
from gtpo_megatron.cli.train import TrainOptions, train
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.run_folder.state import is_held

RECIPE = "recipes.tiny_cpu:gtpo"
RUN_DIR = Path("runs/quickstart")


def run(arguments: Sequence[str]) -> int:
    """``quickstart ...``."""
    options = parse("quickstart", TrainOptions, arguments, recipe=RECIPE)
    run_dir = Path(options.run_dir or RUN_DIR)
    if run_dir == RUN_DIR and not options.resume:
        _remove_last(run_dir, options.config.name)
    return train(replace(options, run_dir=str(run_dir)), command="quickstart")


def _remove_last(run_dir: Path, name: str) -> None:
    """Removes the run of an earlier quickstart, which begins anew each time.

    Raises:
        ConfigError: the folder holds something else, or is in use.
    """
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    try:
        is_ours = load_config(run_dir / "config.yaml").name == name
    except GTPOError:
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"{run_dir} holds something other than the run of a quickstart, which would replace it; move it away, or "
            f"choose another folder with --run-dir"
        )
    if is_held(run_dir):
        raise ConfigError(f"{run_dir} is in use: a quickstart is running; wait for it, or choose another --run-dir")
    shutil.rmtree(run_dir)


COMMAND = Command(
    usage="""\
  quickstart [--run-dir DIR] [--any.field VALUE ...]
                    trains a tiny model with GTPO on two CPU cores, 3 to 6 minutes, each time anew:
                    train recipes.tiny_cpu:gtpo --run-dir runs/quickstart""",
    run=run,
    options=TrainOptions,
    recipe=RECIPE,
    interrupted="--resume goes on from the last checkpoint",
)
