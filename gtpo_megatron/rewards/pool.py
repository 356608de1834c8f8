"""Grading processes with limits a row: a row that hangs costs its time limit once, a crash costs one verdict."""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil

from gtpo_megatron.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the reward function; generous, because a cold file system is slow."""

EXIT_PATIENCE_S = 1.0
"""A process whose pipe is closed ends by itself within this time, or is killed."""

DEFAULT_MEMORY_LIMIT_MIB = 4096

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from gtpo_megatron.rewards.worker import main; main()"
)
"""Gives the child its parent's module path, so that every function the parent can name the child can import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One row's outcome.

    Attributes:
        reward: what the function returned; 0 without a verdict.
        failure: why there is no verdict; None where there is one.
    """

    reward: float
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """What a worker is told: the function, seconds a row, and MiB a row beyond what importing took."""

    function: str
    timeout_s: float
    memory_limit_mib: int


class _Worker:
    """One child process, replaced when it dies or must be killed. Used by one thread at a time; ``end`` by any."""

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # a process is started and ended under it, so that none slips through
        self._has_ended = False
        self._was_disturbed = False
        self._connection: Connection[Any, Any]
        self._is_running: bool
        self._is_ready: bool
        self._start_deadline: float
        self.process: subprocess.Popen[bytes]
        self._start()

    def grade(self, response: str, answer: str) -> Verdict:
        """One row, within its limits; once more where somebody else has killed or stopped the process meanwhile.

        A row that ends its process in that way by itself does so again.

        Raises:
            WorkerError: the process does not start, or the pool was closed meanwhile.
            ConfigError: it cannot import the function.
        """
        verdict = self._grade_once(response, answer)
        return self._grade_once(response, answer) if self._was_disturbed else verdict

    def _grade_once(self, response: str, answer: str) -> Verdict:
        self._was_disturbed = False
        self.wait_until_ready()
        try:
            self._connection.send((response, answer))
        except OSError:  # it died idle, which is not this row's fault
            self._replace()
            self.wait_until_ready()
            self._connection.send((response, answer))
        if not self._connection.poll(self._limits.timeout_s):
            self._was_disturbed = _is_stopped(self.process.pid)
            self._replace()
            return Verdict(reward=0.0, failure=f"took longer than {self._limits.timeout_s:g} s")
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            status = self._replace(patience_s=EXIT_PATIENCE_S)
            self._was_disturbed = status == -signal.SIGKILL
            return Verdict(reward=0.0, failure=f"ended the worker process with status {status}")
        if kind == "memory":  # what the row left behind may be in the next one's way
            self._replace()
        return Verdict(reward=content) if kind == "ok" else Verdict(reward=0.0, failure=content)

    def wait_until_ready(self) -> None:
        """Returns when the function is imported."""
        if self._is_ready:
            return
        reason = f"took longer than {START_LIMIT_S:g} s"
        if self._connection.poll(max(0.0, self._start_deadline - time.monotonic())):
            try:
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                reason = f"ended the process with status {self._exit_status(EXIT_PATIENCE_S)}"
            else:
                if kind == "unusable":
                    raise ConfigError(content)
                self._is_ready = True
                return
        self.end()
        raise WorkerError(
            f"a reward worker did not start: importing {self._limits.function} {reason}; see its output on stderr"
        )

    def end(self) -> None:
        """Ends the process and all it started; it is not replaced any more."""
        with self._lock:
            self._has_ended = True
            self._kill()

    def _start(self) -> None:
        with self._lock:
            if self._has_ended:
                raise WorkerError("the reward pool was closed while it was grading")
            self._connection, theirs = Pipe()
            told = {
                "descriptor": theirs.fileno(),
                "parent": os.getpid(),
                "function": self._limits.function,
                "timeout_s": self._limits.timeout_s,
                "memory_limit_mib": self._limits.memory_limit_mib,
            }
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path]), json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints is no part of our caller's output
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent; and a kill takes the worker's own children along
            )
            theirs.close()
            self._is_running, self._is_ready = True, False
            self._start_deadline = time.monotonic() + START_LIMIT_S

    def _replace(self, *, patience_s: float = 0.0) -> int:
        """Starts another process in place of this one, whose exit status it returns."""
        status = self._exit_status(patience_s)
        self._connection.close()
        self._start()
        return status

    def _exit_status(self, patience_s: float) -> int:
        """Of the process, which is killed if it does not end by itself within so many seconds."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.debug("reward worker %d is killed", self.process.pid)
        with self._lock:
            self._kill()
        return self.process.returncode

    def _kill(self) -> None:
        if not self._is_running:
            return  # by now the number may be another process's
        self._is_running = False
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("reward worker %d was gone already", self.process.pid)
        self.process.wait()


class RewardPool:
    """Runs a reward function in child processes.

    Children are fresh interpreters that import the function by name, so the pool works in scripts, in tests and inside
    Ray actors. They end with their parent, even when it is killed. Each is served by one thread here, so that a row
    waits for none but those before it.

    Args:
        function: ``module:function``.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit of one row; past it the worker is replaced and the row has no verdict.
        memory_limit_mib: what one row may allocate; past it the row has no verdict. 0: no limit.

    Raises:
        ConfigError: the function cannot be imported, or a number is out of range.
        WorkerError: a worker does not start.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_limit_mib: int = DEFAULT_MEMORY_LIMIT_MIB,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or memory_limit_mib < 0:
            raise ConfigError(
                f"num_workers={num_workers}, timeout_s={timeout_s}, memory_limit_mib={memory_limit_mib}: need at least "
                f"1 worker, more than 0 s and at least 0 MiB"
            )
        limits = _Limits(function=function, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib)
        self._workers = [_Worker(limits) for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # Also when the pool is dropped without close(), and at exit.
        self._end = weakref.finalize(self, _end_all, self._workers, self._threads)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the workers as they are now."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, response: str, answer: str) -> "Future[Verdict]":
        """Queues a row; rows are taken in the order of submission.

        Raises:
            WorkerError: the pool is closed. The future raises it too, where a replacement worker does not start.
        """
        if not self._end.alive:
            raise WorkerError("the reward pool is closed; make a new one")
        return self._threads.submit(_grade_by_any, self._idle, response, answer)

    def grade(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """Grades all rows; the order of the result is the order of the rows.

        Raises:
            WorkerError: the pool is closed, or a replacement worker does not start.
        """
        rows = [self.submit(response, answer) for response, answer in zip(responses, answers, strict=True)]
        try:
            return [row.result() for row in rows]
        finally:
            for row in rows:  # nobody waits for them after an error or an interrupt
                row.cancel()

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_stopped(pid: int) -> bool:
    """By a signal, such as a shell or a batch system sends."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _grade_by_any(idle: "queue.SimpleQueue[_Worker]", response: str, answer: str) -> Verdict:
    """By the next idle worker; there are as many threads as workers, so one is idle."""
    worker = idle.get()
    try:
        return worker.grade(response, answer)
    finally:
        idle.put(worker)


def _end_all(workers: Sequence[_Worker], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.end()
