"""A run under attack: started, broken, looked after, and compared with one that nobody touched."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

import psutil

from gtpo_megatron.supervision.process_tree import SHARED_MEMORY, mapped_shared, process_ids, shared_files
from tests.chaos.driver import WIDTH
from tests.chaos.faults import Fault, command_of, find
from tests.chaos.strangers import Strangers

SMALL = [
    *("--data.prompts-per-step", "2", "--rollout.group-size", "4", "--rollout.sampling.max-response-tokens", "24"),
    *("--evaluation.num-problems", "2", "--evaluation.samples", "1", "--evaluation.every-steps", "4"),
    *("--evaluation.sampling.max-response-tokens", "24", "--rollout.kv-cache-mib", "64"),
    *("--checkpoint.every-steps", "1", "--checkpoint.keep", "2", "--logging.no-tensorboard"),
    *("--rollout.max-engine-restarts", "3"),
]
"""A step of half a second: what a fault costs is the start after it."""

LEFT_PATIENCE_S = 20.0
"""For a supervisor to sweep."""

GONE_S = 5.0
"""On a loaded machine a killed process needs time to be gone: its last thread may end long after its first one, which
makes it look like a zombie. The stages until then count as its own."""

TOLD_S = 0.25
"""The supervisor is told a stage before the stage file is."""


class BrokenRun:
    """One start of a run in a folder of its own temporary files."""

    def __init__(self, folder: Path, *, num_steps: int, options: tuple[str, ...], resume: bool) -> None:
        self.folder = folder
        self._options = options
        self.temp = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
        self._strangers = Strangers(self.temp)
        self._stage_file = folder.parent / f"{folder.name}.stage"
        self._stage_file.write_bytes(b" " * WIDTH)
        self._out = folder.parent / f"{folder.name}.{time.monotonic_ns()}.out"
        command = [sys.executable, "-m", "tests.chaos.driver", str(self._stage_file), "train", "recipes.tiny_cpu:gtpo"]
        command += ["--run-dir", str(folder), "--num-steps", str(num_steps), *SMALL, *options]
        environment = {**os.environ, "TMPDIR": str(self.temp), "OMP_NUM_THREADS": "1"}
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command + (["--resume"] if resume else []),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self._family: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def stage(self) -> str:
        """That the run is in; ``start`` before the first."""
        return self._stage_file.read_bytes().decode().strip() or "start"

    @property
    def step(self) -> int:
        """The last one that this start has finished; -1 before it has begun."""
        found = re.findall(r"^step (\d+)/", self.output, re.MULTILINE)
        return int(found[-1]) if found else -1

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for_stage(self, fault: Fault, *, start_s: float, timeout_s: float) -> bool:
        """Until the fault's time has come; False where the run ended before."""
        deadline = time.monotonic() + timeout_s
        if fault.stage == "start":
            time.sleep(min(start_s, 40.0) * (0.15 + fault.delay_s * 3))
            return not self.has_ended()
        is_ready = False
        while not self.has_ended() and time.monotonic() < deadline:
            is_ready = is_ready or self.step >= 1
            if is_ready and self._stage_file.read_bytes().decode().strip() == fault.stage:
                time.sleep(fault.delay_s)
                return True
            time.sleep(0.001 if is_ready else 0.05)
        return False

    def strike(self, fault: Fault, *, timeout_s: float) -> tuple[int, set[str]] | None:
        """Sends the signal; the process, and the stages in which that may have been."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended() and time.monotonic() < deadline:
            victim = find(fault.kind, self.process.pid, self.output)
            if victim is not None:
                self.look()
                before = self.stage
                try:
                    descriptor = os.pidfd_open(victim.pid)
                except ProcessLookupError:
                    continue
                with os.fdopen(descriptor) as end:
                    try:
                        victim.kill()
                    except psutil.NoSuchProcess:
                        continue
                    stages = {before} | self._stages(GONE_S, end=end)
                return victim.pid, stages | self._stages(TOLD_S)
            time.sleep(0.002)
        return None

    def _stages(self, seconds: float, *, end: TextIO | None = None) -> set[str]:
        """Those that the run is in meanwhile; not longer than until ``end``, a pidfd, says that the process is gone."""
        stages = {self.stage}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (end and select.select([end], [], [], 0)[0]):
            stages.add(self.stage)
            time.sleep(0.005)
        return stages | {self.stage}

    def look(self) -> None:
        """Remembers every process of the run."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._family[process.pid] = process
        except psutil.NoSuchProcess:
            return

    def left_behind(self) -> list[str]:
        """Processes, shared memory and temporary files, after the time that a sweep may take."""
        deadline = time.monotonic() + LEFT_PATIENCE_S
        while True:
            left = self._left()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.25)

    def _left(self) -> list[str]:
        left = [f"process {p.pid} {' '.join(command_of(p))[:80]}" for p in self._alive()]
        left += [f"temp {path.name}" for path in self.temp.iterdir() if not _is_torchs(path)]
        used = set().union(*(mapped_shared(pid) for pid in process_ids()))  # by somebody who has not been looked at yet
        fresh = {name: inode for name, inode in shared_files().items() if name not in self._strangers.names}
        return left + [_described(name) for name, inode in sorted(fresh.items()) if inode not in used]

    def _alive(self) -> list[psutil.Process]:
        alive = [process for process in self._family.values() if _is_running(process)]
        mark = str(self.temp).encode()
        for pid in psutil.pids():
            if pid in self._family or pid == self.process.pid:
                continue
            try:
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    alive += [p for p in [psutil.Process(pid)] if _is_running(p)]
            except (OSError, psutil.Error):
                continue
        return alive

    def clear(self) -> None:
        """Ends what is left, so that one fault's leavings are not the next one's."""
        if not self.has_ended():
            self.process.kill()
            self.process.wait()
        for process in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        subprocess.run(["rm", "-rf", str(self.temp)], check=False)
        self._strangers.close()


def _described(name: str) -> str:
    """With size and age, which tell an engine's queues apart, and whether they are this start's."""
    try:
        stat = (SHARED_MEMORY / name).stat()
    except OSError:
        return f"shm {name} (gone since)"
    return f"shm {name} ({stat.st_size} bytes, last written {time.time() - stat.st_mtime:.0f} s ago)"


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_torchs(path: Path) -> bool:
    """The folder, still empty, that torch makes for each user when it is imported."""
    return path.name.startswith("torchinductor_") and not any(path.iterdir())
