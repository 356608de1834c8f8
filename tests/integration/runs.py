"""Real runs of the installed command: started, watched, killed, read back."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gtpo_megatron.observability.metrics import deterministic
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.supervision.process_tree import SHARED_MEMORY, mapped_shared, shared_files

SMALL = [
    "--data.prompts-per-step", "4",
    "--rollout.group-size", "4",
    "--evaluation.num-problems", "6",
    "--evaluation.samples", "2",
    "--evaluation.every-steps", "2",
    "--checkpoint.every-steps", "2",
    "--cluster.start-deadline-s", "300",
    "--cluster.stage-deadline-s", "240",
]  # fmt: skip
"""Overrides that make a step take a second; starting the processes is what such a run costs."""

SMALL_SFT = [
    "--data.rows-per-step", "16",
    "--data.heldout-rows", "32",
    "--heldout-every-steps", "2",
    "--checkpoint.every-steps", "2",
    "--cluster.start-deadline-s", "300",
    "--cluster.stage-deadline-s", "240",
]  # fmt: skip
"""The same for a warm start."""

LEAVINGS = pytest.mark.xdist_group("leavings")
"""One after the other, if there are several workers: a killed engine leaves files in /dev/shm until its run ends, and
other tests look for what their own runs leave there."""


def shared_memory_of(pids):
    """Files in /dev/shm that these processes have mapped: for whoever kills them, since nobody else removes those."""
    mapped = set().union(*(mapped_shared(pid) for pid in pids))
    return [SHARED_MEMORY / name for name, inode in shared_files().items() if inode in mapped]


STARTED: list[subprocess.Popen] = []
"""Commands of the test that runs now; what is left of them at its end is killed (``conftest.py``)."""


class Run:
    """One invocation of ``gtpo-megatron train``, or of ``sft``."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        recipe: str = "recipes.tiny_cpu:gtpo",
        num_steps: int = 2,
        cwd: Path | None = None,
        command: str = "train",
        small: Sequence[str] | None = None,
    ) -> None:
        self.folder = folder
        self._output = folder.parent / f"{folder.name}.{time.monotonic_ns()}.out"
        if small is None:
            small = SMALL if command == "train" else SMALL_SFT
        line = [str(Path(sys.executable).with_name("gtpo-megatron")), command, recipe]
        line += ["--run-dir", str(folder), "--num-steps", str(num_steps), *small, *overrides]
        with self._output.open("wb") as out:
            self.process = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd)
        STARTED.append(self.process)

    @property
    def output(self) -> str:
        """Everything it printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = 400.0) -> int:
        """Exit status; the process is ended if it takes longer."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output[-3000:]}") from None

    def succeed(self) -> None:
        """Waits for a good end."""
        assert self.wait() == 0, self.output[-3000:]

    def wait_for(self, pattern: str, timeout_s: float = 400.0) -> re.Match:
        """Waits until the output holds the pattern."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = re.search(pattern, self.output)
            if found:
                return found
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before {pattern!r}:\n{self.output[-3000:]}")
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"no {pattern!r} within {timeout_s} s:\n{self.output[-3000:]}")

    def pid_of(self, name: str) -> int:
        """Process id of ``rank 1``, ``rollout engine`` or ``reward process``."""
        return int(self.wait_for(rf"{name}: process (\d+) on").group(1))

    def kill(self) -> None:
        """SIGKILL to the driver."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def start_in_shell(line: str) -> "subprocess.Popen[bytes]":
    """A command line in a shell, which leads a process group of its own; what is left at the test's end is killed."""
    STARTED.append(subprocess.Popen(["bash", "-c", line], start_new_session=True))
    return STARTED[-1]


def steps(folder: Path) -> list[dict]:
    """What a run computed, step by step, times and memory aside."""
    return [deterministic(row) for row in read_metrics(folder / "metrics.jsonl")]
