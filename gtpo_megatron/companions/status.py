"""The status of a run, read from its folder only, so also for dead and remote runs."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gtpo_megatron.config.serialize import load_any
from gtpo_megatron.errors import CheckpointError, DataError
from gtpo_megatron.run_folder.checkpoints import DRIVER_FILE, Checkpoint, CheckpointFolder
from gtpo_megatron.run_folder.folder import RunFolder, read_contents, sizes_by_label
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.run_folder.provenance import LOG_FILE, logged_errors
from gtpo_megatron.run_folder.state import FINISHED, RunState, is_held, read_state

STEPS_FOR_TIME_LEFT = 10
"""Steps averaged for the time left, as in the live display."""
MIN_SILENCE_S = 600.0
SILENCE_STEPS = 5.0
"""A run is silent if its last step is more than this many steps' time, and ten minutes, ago."""
_ACCURACY = re.compile(r"eval/(.+)_mean_at_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Accuracy on one held-out set.

    Attributes:
        label: label of the set.
        step: step of the last measurement.
        value: mean over problems and samples.
        before: value before training; None if not measured.
    """

    label: str
    step: int
    value: float
    before: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The status of a run.

    Attributes:
        name: name of the run.
        folder: folder of the run.
        state: ``running``, ``silent``, ``finished``, ``stopped`` (saved on request), ``failed`` (with a reason),
            ``gone`` (its process ended without a record), or ``not started``.
        driver: the last driver's record; None before the first.
        num_steps: steps of the whole run.
        step: finished steps.
        rows: metrics of all steps.
        last_row: metrics of the last step.
        last_row_age_s: time since the last step was written.
        step_s: median time of the last steps; None without steps.
        checkpoint_step: step of the last checkpoint; None without one.
        checkpoint_age_s: time since it was finished.
        accuracies: the last measurement on every held-out set.
        num_errors: error lines of the log since the last start.
        last_error: the last of them.
        num_problems: problems of each held-out set, by its label, as far as known.
        remarks: sentences about what could not be read.
    """

    name: str
    folder: Path
    state: str
    driver: RunState | None
    num_steps: int
    step: int
    rows: tuple[dict[str, Any], ...]
    last_row: dict[str, Any]
    last_row_age_s: float | None
    step_s: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    accuracies: tuple[Accuracy, ...]
    num_errors: int
    last_error: str
    num_problems: dict[str, int]
    remarks: tuple[str, ...]

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left of a running run."""
        if self.step_s is None or self.state not in ("running", "silent"):
            return None
        return self.step_s * (self.num_steps - self.step)


def read_status(path: Path) -> RunStatus:
    """Reads the status of a run.

    Raises:
        DataError: there is no such folder, or no run in it.
        ConfigError: its configuration cannot be read.
    """
    if not (path / "config.yaml").exists():
        raise DataError(f"{path}: no run is in this folder (no config.yaml); give the folder of a run")
    config, now, remarks = load_any(path / "config.yaml"), time.time(), []
    rows: list[dict[str, Any]] = []
    metrics_file = path / METRICS_FILE
    if metrics_file.exists():
        try:
            rows = read_metrics(metrics_file)
        except DataError as error:
            remarks.append(str(error))
    checkpoint = None
    try:
        checkpoint = _latest(RunFolder(path).checkpoints)
        remarks += [checkpoint.note] if checkpoint and checkpoint.note else []
    except CheckpointError as error:
        remarks.append(str(error))
    step = max((row["step"] for row in rows), default=0)
    driver, held = None, is_held(path)
    try:
        driver = read_state(path)
    except DataError as error:
        remarks.append(str(error))
    row_age = max(0.0, now - metrics_file.stat().st_mtime) if rows else None
    seconds = [row["timing/step_s"] for row in rows[-STEPS_FOR_TIME_LEFT:] if row.get("timing/step_s")]
    step_s = median(seconds) if seconds else None
    errors = logged_errors(path / LOG_FILE)
    num_problems: dict[str, int] = {}
    try:
        num_problems = sizes_by_label(read_contents(path))
    except DataError as error:
        remarks.append(str(error))
    return RunStatus(
        name=config.name,
        folder=path,
        state=_state(driver, held=held, silence_s=row_age, step_s=step_s),
        driver=driver,
        num_steps=config.num_steps,
        step=step,
        rows=tuple(rows),
        last_row=rows[-1] if rows else {},
        last_row_age_s=row_age,
        step_s=step_s,
        checkpoint_step=checkpoint.state.step if checkpoint else None,
        checkpoint_age_s=max(0.0, now - _saved_at(checkpoint, now)) if checkpoint else None,
        accuracies=_accuracies(rows),
        num_errors=len(errors),
        last_error=errors[-1] if errors else "",
        num_problems=num_problems,
        remarks=tuple(remarks),
    )


def _latest(checkpoints: CheckpointFolder) -> Checkpoint | None:
    """The last checkpoint; reads twice, since a running run may remove the first one meanwhile."""
    try:
        return checkpoints.latest()
    except CheckpointError:
        return checkpoints.latest()


def _saved_at(checkpoint: Checkpoint, now: float) -> float:
    """Time of the checkpoint; ``now`` if the run has removed it meanwhile."""
    try:
        return (checkpoint.path / DRIVER_FILE).stat().st_mtime
    except FileNotFoundError:
        return now


def _state(driver: RunState | None, *, held: bool, silence_s: float | None, step_s: float | None) -> str:
    if held:
        limit = max(MIN_SILENCE_S, SILENCE_STEPS * (step_s or 0.0))
        since_start = time.time() - driver.started_at if driver else 0.0
        quiet = since_start if silence_s is None else min(silence_s, since_start)
        return "silent" if quiet > limit else "running"
    if driver is None:
        return "not started"
    if driver.outcome == FINISHED:
        return "finished"
    if driver.outcome.startswith("stopped"):
        return "stopped"
    return "failed" if driver.outcome else "gone"


def _accuracies(rows: list[dict[str, Any]]) -> tuple[Accuracy, ...]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and (match := _ACCURACY.fullmatch(name)):
                found.setdefault(match.group(1), []).append((row["step"], value))
    return tuple(
        Accuracy(
            label=label,
            step=points[-1][0],
            value=points[-1][1],
            before=points[0][1] if points[0][0] == 0 and len(points) > 1 else None,
        )
        for label, points in sorted(found.items())
    )
