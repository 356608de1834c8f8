"""A training run as a child process, which can be stopped, or killed with all its descendants."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import psutil

from gtpo_megatron.errors import DataError, WorkerError
from gtpo_megatron.orchestration.run_supervisor import SWEEP_S, is_supervisor
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED, SHELL_OFFSET
from gtpo_megatron.supervision.process_tree import command_line

POLL_S = 0.05
"""Short compared with a step, so that a kill comes at the intended step."""
SHOWN_CHARACTERS = 2000
"""Of the output of a failed run, in messages."""

_BOOTSTRAP = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0); "  # PR_SET_PDEATHSIG
    "from gtpo_megatron.cli.dispatch import main; main()"
)
"""A run that saves itself and stops when the process that has started it is gone."""

ProcessState = Literal["running", "stopped", "finished"]
"""``stopped``: the run was asked to stop, and can be resumed."""


class TrainingProcess:
    """One invocation of ``gtpo-megatron train``.

    Args:
        config_file: the resolved configuration.
        folder: of the run.
        output: file for what it prints.
        resume: resume from the folder's last checkpoint.
    """

    def __init__(self, config_file: Path, folder: Path, *, output: Path, resume: bool) -> None:
        self._folder = folder
        self._output = output
        command = [sys.executable, "-c", _BOOTSTRAP, "train", str(config_file), "--run-dir", str(folder)]
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to the group is for this process, which asks the run to stop
            )

    @property
    def last_step(self) -> int:
        """The last step in the metrics; -1 before the first row."""
        try:
            return max((row["step"] for row in read_metrics(self._folder / METRICS_FILE)), default=-1)
        except DataError:
            return -1

    def wait(self, on_step: Callable[[int], None], *, until: Callable[[], bool] | None = None) -> None:
        """Waits until the run finishes, or until a condition holds.

        Args:
            on_step: called repeatedly with the last step.
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
        """Waits until the run finishes, or for a deadline.

        Args:
            deadline: time of ``time.monotonic``; may be infinite.

        Raises:
            WorkerError: it failed.
        """
        while self._process.poll() is None and time.monotonic() <= deadline:
            time.sleep(POLL_S)
        return self._state()

    def stop(self, *, within_s: float) -> ProcessState:
        """Asks the run to save and stop after the current step; call :meth:`kill` afterwards.

        Args:
            within_s: timeout; must cover a step and a checkpoint.

        Returns:
            ``running`` after the timeout; the run can then be resumed from an earlier checkpoint.

        Raises:
            WorkerError: it failed.
        """
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=within_s)
        return self._state()

    def ask_to_stop(self) -> None:
        """Asks the run to save and stop, once; does not wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _state(self) -> ProcessState:
        status = self._process.poll()
        if status is None:
            return "running"
        # the signal itself, or an interrupted command, if it came before the run listened
        if status in (EXIT_STOPPED, -signal.SIGTERM, SHELL_OFFSET + signal.SIGTERM):
            return "stopped"
        if status:
            self._raise("")
        return "finished"

    def _raise(self, when: str) -> NoReturn:
        text = self._output.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
        raise WorkerError(f"the run in {self._folder} ended with status {self._process.returncode}{when}:\n{text}")

    def kill(self) -> None:
        """Kills the driver, whose supervisor cleans up, then what it started; does nothing after the end."""
        if self._process.poll() is not None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
        supervisors = [child for child in children if is_supervisor(command_line(child.pid))]
        self._process.kill()
        psutil.wait_procs(supervisors, timeout=2 * SWEEP_S)  # which look at the driver, not yet waited for
        self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)
