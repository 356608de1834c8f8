"""Runs a configuration unbroken, and again with a kill and a resume, and compares."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gtpo_megatron.config.profile import ProfileConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.training_process import TrainingProcess
from gtpo_megatron.run_folder.checkpoints import LATEST
from gtpo_megatron.verify_resume.compare import Comparison, compare_runs
from gtpo_megatron.weights.megatron.checkpoint_files import Verify

_MARK = ".verify-resume"
"""In a folder that this command made, and may remove."""


def verify_resume(
    config: RunConfig,
    *,
    output: Path,
    num_steps: int,
    kill_after: int,
    keep: bool,
    console: Console,
    verify: Verify = "full",
) -> list[Comparison]:
    """Trains three times: unbroken; up to a kill; from there to the end.

    Args:
        config: of the run to be proven; only its length, its saves, its loggers and its profile are changed.
        output: for the scratch runs; made here, and removed where all is equal unless ``keep``.
        num_steps: of the unbroken run.
        kill_after: the step whose checkpoint the second run is killed after.
        keep: leave the scratch runs.
        verify: what of their checkpoints is compared with the manifests, beside with each other.
        console: for the progress.

    Raises:
        ConfigError: steps that cannot be, a folder that holds something else, or a run that does not repeat itself.
        WorkerError: a run failed.
    """
    if not 0 < kill_after < num_steps:
        raise ConfigError(f"kill_after={kill_after}: must lie between 1 and steps - 1 = {num_steps - 1}")
    if config.rollout.partial:
        raise ConfigError(
            "rollout.partial=True: which token new weights meet depends on the clock, so that two unbroken runs differ "
            "as well, and a comparison says nothing of the resume; verify with --rollout.no-partial"
        )
    _make_folder(output)
    config_file = output / "config.yaml"
    config_file.write_text(to_yaml(_scratch_config(config, num_steps=num_steps, kill_after=kill_after)), "utf-8")
    whole, broken = output / "unbroken", output / "resumed"
    with _progress(console) as progress:

        def train(title: str, folder: Path, *, resume: bool = False, until: Callable[[], bool] | None = None) -> None:
            task = progress.add_task(title, total=num_steps)
            if not console.is_terminal:
                console.print(title)
            out = output / f"{title.replace(' ', '_')}.out"
            run = TrainingProcess(config_file, folder, output=out, resume=resume)
            try:
                run.wait(lambda step: progress.update(task, completed=max(0, step)), until=until)
            finally:
                run.kill()

        marker = broken / "checkpoints" / LATEST
        train("unbroken", whole)
        train(
            f"killed after step {kill_after}",
            broken,
            until=lambda: marker.exists() and marker.read_text().strip() == f"step_{kill_after}",
        )
        train("resumed", broken, resume=True)
    results = list(compare_runs(whole, broken, verify=verify))
    if all(result.is_equal for result in results) and not keep:
        shutil.rmtree(output)
    else:
        console.print(f"the runs are in {output}", highlight=False)
    return results


def show(results: Sequence[Comparison], console: Console) -> bool:
    """Prints the verdict; whether all is equal."""
    table = Table("compared", "how much", "to the last bit")
    for result in results:
        table.add_row(result.part, result.compared, "[green]equal" if result.is_equal else "[red]DIFFERENT")
    console.print(table)
    first = next((result for result in results if not result.is_equal), None)
    if first is not None:
        console.print(f"first difference, in {first.part}: {first.difference}", markup=False, highlight=False)
    else:
        console.print("a run that is killed and resumed equals one that is not")
    return first is None


def _scratch_config(config: RunConfig, *, num_steps: int, kill_after: int) -> RunConfig:
    """A short run that saves where it is killed, exports, traces nothing, and tells nobody outside."""
    return dataclasses.replace(
        config,
        num_steps=num_steps,
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=kill_after, keep_best=0, export_hf=True),
        logging=dataclasses.replace(config.logging, wandb_project=None, wandb_entity=None, tensorboard=False),
        profile=ProfileConfig(),
    )


def _make_folder(output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        if not (output / _MARK).exists():
            raise ConfigError(f"output={output} is not empty and not of an earlier verify-resume; choose another")
        shutil.rmtree(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / _MARK).touch()
    except OSError as error:
        raise ConfigError(f"output={output} cannot be made: {error.strerror}; choose another") from error


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
