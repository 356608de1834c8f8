"""Trains without interruption, and again with a kill and a resume, and compares."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gtpo_megatron.companions.training_process import TrainingProcess
from gtpo_megatron.companions.verify_resume.compare import Comparison, compare_runs, last_checkpoint
from gtpo_megatron.config.output import LoggingConfig, ProfileConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.controller import ROLLOUTS_FILE
from gtpo_megatron.orchestration.loop.group_scheduler import labels_sum
from gtpo_megatron.run_folder.checkpoints import LATEST
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.sentence import print_sentence
from gtpo_megatron.weights.megatron.checkpoint_files import Verify
from gtpo_megatron.weights.megatron.restricted_pickle import load_torch

_MARK = ".verify-resume"
"""Marks a folder that this command has created, and may remove."""


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
    """Trains three times: without interruption; up to a kill; from there to the end.

    Two continuous runs (``rollout.is_continuous``) differ anyway, since what is whole when a step begins depends on the
    clock. Of those only the broken one is trained, and its account of prompts is checked.

    Args:
        config: the run's configuration; length, checkpoints, loggers and profiling are changed.
        output: folder of the scratch runs, removed if all is equal unless ``keep``.
        num_steps: steps of the uninterrupted run.
        kill_after: the second run is killed after the checkpoint of this step.
        keep: keep the scratch runs.
        verify: which checks their checkpoints must pass.
        console: for the progress.

    Raises:
        ConfigError: invalid steps, another folder's content, or a configuration that is not reproducible.
        WorkerError: a run failed.
    """
    if not 0 < kill_after < num_steps:
        raise ConfigError(f"kill_after={kill_after}: must lie between 1 and steps - 1 = {num_steps - 1}")
    _make_folder(output)
    config_file = output / "config.yaml"
    config_file.write_text(to_yaml(_scratch_config(config, num_steps=num_steps, kill_after=kill_after)), "utf-8")
    whole, broken = output / "unbroken", output / "resumed"
    with _progress(console) as progress:

        def train(title: str, folder: Path, *, resume: bool = False, until: Callable[[], bool] | None = None) -> None:
            task = progress.add_task(title, total=num_steps)
            if not console.is_terminal:
                print_sentence(console, title)
            out = output / f"{title.replace(' ', '_')}.out"
            run = TrainingProcess(config_file, folder, output=out, resume=resume)
            try:
                run.wait(lambda step: progress.update(task, completed=max(0, step)), until=until)
            finally:
                run.kill()

        marker = broken / "checkpoints" / LATEST
        if not config.rollout.is_continuous:
            train("unbroken", whole)
        train(
            f"killed after step {kill_after}",
            broken,
            until=lambda: marker.exists() and marker.read_text().strip() == f"step_{kill_after}",
        )
        train("resumed", broken, resume=True)
    if config.rollout.is_continuous:
        results = check_account(broken, last_checkpoint(broken, verify), num_steps=num_steps)
    else:
        results = list(compare_runs(whole, broken, verify=verify))
    if all(result.is_equal for result in results) and not keep:
        shutil.rmtree(output)
    else:
        print_sentence(console, f"the runs are in {output}")
    return results


def show(results: Sequence[Comparison], console: Console, *, is_continuous: bool) -> bool:
    """Prints the result; returns whether all is equal, or of a continuous run whether every prompt is accounted for."""
    table = Table("compared", "how much", "account" if is_continuous else "to the last bit")
    for result in results:
        good, bad = ("whole", "WRONG") if is_continuous else ("equal", "DIFFERENT")
        table.add_row(result.part, result.compared, f"[green]{good}" if result.is_equal else f"[red]{bad}")
    console.print(table)
    first = next((result for result in results if not result.is_equal), None)
    if first is not None:
        print_sentence(console, f"first difference, in {first.part}: {first.difference}")
    elif is_continuous:
        print_sentence(
            console,
            "a run that is killed and resumed trains every prompt once; its bits depend on the clock, as those of any "
            "run with rollout.max_staleness above 1, partial or over_sample",
        )
    else:
        print_sentence(console, "a run that is killed and resumed equals one that is not")
    return first is None


def _scratch_config(config: RunConfig, *, num_steps: int, kill_after: int) -> RunConfig:
    """The configuration of a short run without profiling, whose metrics go to its folder alone."""
    logging = LoggingConfig(  # afresh, so that no logger gets runs of it, whichever there are
        log_level=config.logging.log_level,
        rollout_groups_per_step=config.logging.rollout_groups_per_step,
        rollout_every_steps=config.logging.rollout_every_steps,
    )
    return dataclasses.replace(
        config,
        num_steps=num_steps,
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=kill_after, keep_best=0, export_hf=True),
        logging=logging,
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


PLACES = ("trained", "dropped", "under_way")


def check_account(run: Path, checkpoint: Path, *, num_steps: int) -> list[Comparison]:
    """Checks a continuous run that was killed and resumed.

    Args:
        run: folder of the run.
        checkpoint: its last.
        num_steps: of the run.

    Raises:
        DataError: the run has no metrics.
    """
    rows = [row for row in read_metrics(run / METRICS_FILE) if row["step"] > 0]
    state = load_torch(checkpoint / ROLLOUTS_FILE)["scheduled"]
    return [
        Comparison(part="steps", compared=f"{len(rows)} rows", difference=_steps_difference(rows, num_steps)),
        Comparison(
            part="numbers of prompts", compared=f"{len(rows)} rows", difference=next(filter(None, map(_sums, rows)), "")
        ),
        Comparison(
            part="every prompt once", compared=f"{state['drawn']} prompts", difference=_labels_difference(state)
        ),
    ]


def _steps_difference(rows: list[dict[str, Any]], num_steps: int) -> str:
    steps = [int(row["step"]) for row in rows]
    return "" if steps == list(range(1, num_steps + 1)) else f"steps {steps}, expected 1 to {num_steps}"


def _sums(row: dict[str, Any]) -> str:
    drawn, *places = (int(row[f"prompts/{name}_count"]) for name in ("drawn", *PLACES))
    named = ", ".join(f"{name} {count}" for name, count in zip(PLACES, places, strict=True))
    return "" if drawn == sum(places) else f"step {int(row['step'])}: drawn {drawn}, but {named}"


def _labels_difference(state: dict[str, Any]) -> str:
    """Trained, dropped and under way together are the labels from 0 on, each once."""
    found = (state["closed_sum"] + labels_sum([*state["ready"], *state["waiting"]])) % (1 << 64)
    if found == labels_sum(range(state["drawn"])):
        return ""
    return f"the groups that are trained, dropped or under way are not the {state['drawn']} drawn ones, each once"
