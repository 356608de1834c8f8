"""A training run in a process of its own, to be watched, and killed with everything it started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import psutil

from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED

POLL_S = 0.05
"""Short against a step, so that a kill comes where it is meant to."""
SHOWN_CHARACTERS = 2000
"""Of the output of a run that failed."""

ProcessState = Literal["running", "stopped", "finished"]
"""A run that has stopped was asked to, by us or from outside, and goes on from its last checkpoint."""


class TrainingProcess:
    """One invocation of ``gtpo-megatron train``.

    Args:
        config_file: the resolved configuration.
        folder: of the run.
        output: file for what it prints.
        resume: go on from the folder's last checkpoint.
    """

    def __init__(self, config_file: Path, folder: Path, *, output: Path, resume: bool) -> None:
        self._folder = folder
        self._output = output
        command = [sys.executable, "-m", "gtpo_megatron.cli", "train", str(config_file), "--run-dir", str(folder)]
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])], stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def last_step(self) -> int:
        """In the metrics so far; -1 before the first row."""
        try:
            return max((row["step"] for row in read_metrics(self._folder / METRICS_FILE)), default=-1)
        except DataError:
            return -1

    def wait(self, on_step: Callable[[int], None], *, until: Callable[[], bool] | None = None) -> None:
        """Waits for a good end, or until a condition holds.

        Args:
            on_step: told the last step, again and again.
            until: None waits for the end.

        Raises:
            WorkerError: it failed, or ended before the condition held.
        """
        while self._process.poll() is None:
            on_step(self.last_step)
            if until is not None and until():
                return
            time.sleep(POLL_S)
        on_step(self.last_step)
        if self._process.returncode or until is not None:
            self._raise("" if until is None else " before it could be killed")

    def wait_until(self, deadline: float) -> ProcessState:
        """Waits for a good end, or for a moment.

        Args:
            deadline: on ``time.monotonic``; may be infinite.

        Raises:
            WorkerError: it failed.
        """
        while self._process.poll() is None and time.monotonic() <= deadline:
            time.sleep(POLL_S)
        return self._state()

    def stop(self, *, within_s: float) -> ProcessState:
        """Asks the run to save and stop after its step; follow it with :meth:`kill`.

        Args:
            within_s: longest time to wait for it; a step and a checkpoint.

        Returns:
            ``running`` where that was too short; it then goes on from an earlier checkpoint.

        Raises:
            WorkerError: it failed on the way.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=within_s)
        return self._state()

    def _state(self) -> ProcessState:
        status = self._process.poll()
        if status is None:
            return "running"
        if status in (EXIT_STOPPED, -signal.SIGTERM):  # the signal itself, where it came before there was a handler
            return "stopped"
        if status:
            self._raise("")
        return "finished"

    def _raise(self, when: str) -> NoReturn:
        text = self._output.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
        raise WorkerError(f"the run in {self._folder} ended with status {self._process.returncode}{when}:\n{text}")

    def kill(self) -> None:
        """SIGKILL to the driver, then to ranks, engine and all else that it started; harmless after the end."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)
