"""The folder of a run: what it holds, which configuration it belongs to, and its checkpoints.

::

    config.yaml  metrics.jsonl  events.out.*  rollouts/  hf/  report.html  log.txt
    checkpoints/step_N/  checkpoints/latest

A checkpoint appears under its name only when it is whole: it is written aside, renamed, then ``latest`` is replaced.
"""

import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import difference, load_config, to_yaml
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.orchestration import run_state

logger = logging.getLogger(__name__)

_CHECKPOINT_NAME = re.compile(r"step_(\d+)")

RESUMABLE_CHANGES = (
    "num_steps:",
    "logging.",
    "checkpoint.",
    *("cluster.address:", "cluster.num_nodes:", "cluster.num_cpus:", "cluster.object_store_mib:"),
    *("cluster.start_deadline_s:", "cluster.stage_deadline_s:"),
)
"""Fields that may differ between a run and its continuation: they do not change what a step computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """The driver's part of a checkpoint.

    Attributes:
        step: finished steps.
        sampler: the prompt sampler's position.
        counters: totals over the run, such as responses generated.
    """

    step: int
    sampler: dict[str, Any]
    counters: dict[str, int]


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.hf_folder = path / "hf"
        self.report_file = path / "report.html"
        self._checkpoints = path / "checkpoints"
        self._lock_descriptor: int | None = None

    def open(self, config: RunConfig, *, resume: bool) -> None:
        """Creates the folder for a new run, or checks that it belongs to this one.

        Raises:
            ConfigError: it holds a run and ``resume`` is not asked for, or another run than this.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if self.config_file.exists():
                self._check_same_run(config, resume=resume)
            self._write_aside(self.config_file, to_yaml(config))
            run_state.record_start(self.path)
        except OSError as error:
            raise ConfigError(f"run folder {self.path} cannot be written: {error.strerror}; choose another") from error

    def close(self) -> None:
        """Lets another process use the folder; the end of this process does so too, however it comes."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _lock(self) -> None:
        self.close()
        self._lock_descriptor = run_state.acquire(self.path)
        if self._lock_descriptor is None:
            raise ConfigError(f"run folder {self.path} is in use by another process; wait for it or stop it")

    def _check_same_run(self, config: RunConfig, *, resume: bool) -> None:
        if not resume:
            raise ConfigError(f"run folder {self.path} holds a run already; add --resume to go on, or choose another")
        changes = difference(load_config(self.config_file), config)
        free = RESUMABLE_CHANGES if config.optimizer.schedule == "constant" else RESUMABLE_CHANGES[1:]
        forbidden = [row for row in changes if not row.startswith(free)]
        if forbidden:
            raise ConfigError(
                f"run folder {self.path} holds a run with another configuration: {'; '.join(forbidden)}; "
                f"go on with the old values, or choose another folder"
            )

    def latest_checkpoint(self) -> tuple[Path, DriverState] | None:
        """The last complete checkpoint, or None where there is none yet.

        Raises:
            CheckpointError: the marker names a checkpoint that is not whole.
        """
        marker = self._checkpoints / "latest"
        if not marker.exists():
            return None
        folder = self._checkpoints / marker.read_text(encoding="utf-8").strip()
        try:
            state = DriverState(**json.loads((folder / "driver.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{marker} names {folder.name}, which cannot be read: {error}") from error
        return folder, state

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder for the ranks to write to."""
        scratch = self._checkpoints / f".step_{step}.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{scratch} cannot be made: {error.strerror}") from error
        return scratch

    def finish_checkpoint(self, scratch: Path, state: DriverState, *, keep: int) -> Path:
        """Adds the driver's part, gives the checkpoint its name, and drops all but the last ``keep``."""
        final = self._checkpoints / f"step_{state.step}"
        try:
            self._write_aside(scratch / "driver.json", json.dumps(asdict(state), indent=1))
            if final.exists():  # a run that died between two markers writes this step again
                shutil.rmtree(final)
            scratch.rename(final)
            self._write_aside(self._checkpoints / "latest", final.name + "\n")
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final} could not be finished: {error.strerror}; the last good one stays valid"
            ) from error
        self._drop_old(state.step, keep=keep)
        logger.info("checkpoint %s is complete", final)
        return final

    def _drop_old(self, step: int, *, keep: int) -> None:
        """Removes all but the last ``keep`` up to this step; a later one is left over from a run that went another way.

        The checkpoint just finished is never removed, and trouble in removing others is logged only: nothing is lost.
        """
        numbered = {
            int(match.group(1)): path
            for path in self._checkpoints.iterdir()
            if path.is_dir() and (match := _CHECKPOINT_NAME.fullmatch(path.name))
        }
        for number in sorted(number for number in numbered if number <= step)[:-keep]:
            try:
                shutil.rmtree(numbered[number])
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", numbered[number], error)

    @staticmethod
    def _write_aside(path: Path, text: str) -> None:
        scratch = path.with_name(path.name + ".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
