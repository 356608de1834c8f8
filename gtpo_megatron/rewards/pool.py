"""Grading processes with a time limit a row: a row that hangs costs its limit once, a crash costs one verdict."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from gtpo_megatron.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the reward function; generous, because a cold file system is slow."""

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


class _Worker:
    """One child process and what it is doing: starting, idle, or busy with a row until a deadline."""

    def __init__(self, function: str, timeout_s: float) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        told = {
            "descriptor": theirs.fileno(),
            "parent": os.getpid(),
            "function": function,
            "timeout_s": timeout_s,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps([str(entry) for entry in sys.path]), json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward prints is no part of our caller's output
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the parent; and a kill takes the worker's own children along
        )
        theirs.close()
        self.ready = False
        self.row: int | None = None
        self.deadline = time.monotonic() + START_LIMIT_S

    def give(self, row: int, response: str, answer: str, timeout_s: float) -> None:
        """Sends a row and starts its clock."""
        self.row = row
        self.deadline = time.monotonic() + timeout_s
        self.connection.send((response, answer))

    def kill(self) -> None:
        """Ends the process and all it started."""
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("reward worker %d was gone already", self.process.pid)
        self.process.wait()


class RewardPool:
    """Runs a reward function in child processes.

    Children are fresh interpreters that import the function by name, so the pool works in scripts, in tests and inside
    Ray actors. They end with their parent, even when it is killed. One call of ``grade`` at a time.

    Args:
        function: ``module:function``.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit of one row; past it the worker is replaced and the row has no verdict.

    Raises:
        ConfigError: the function cannot be imported, or a number is out of range.
        WorkerError: a worker does not start.
    """

    def __init__(self, function: str, *, num_workers: int, timeout_s: float) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(
                f"num_workers={num_workers}, timeout_s={timeout_s}: need at least 1 worker and more than 0 s"
            )
        self._function = function
        self._timeout_s = timeout_s
        self._workers = [_Worker(function, timeout_s) for _ in range(num_workers)]
        # Also when the pool is dropped without close(), and at exit.
        self._end = weakref.finalize(self, _kill_all, self._workers)
        try:
            while not all(worker.ready for worker in self._workers):
                self._advance({})
        except BaseException:
            self.close()
            raise

    def grade(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """Grades all rows; the order of the result is the order of the rows.

        Raises:
            WorkerError: the pool is closed, or a replacement worker does not start.
        """
        if not self._workers:
            raise WorkerError("the reward pool is closed; make a new one")
        todo = deque(range(len(responses)))
        verdicts: dict[int, Verdict] = {}
        while len(verdicts) < len(responses):
            for worker in self._workers:
                if todo and worker.ready and worker.row is None:
                    row = todo.popleft()
                    try:
                        worker.give(row, responses[row], answers[row], self._timeout_s)
                    except OSError:  # it died idle: its end is closed, which the next _advance sees
                        worker.row = None
                        todo.appendleft(row)
            self._advance(verdicts)
        return [verdicts[row] for row in range(len(responses))]

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, verdicts: dict[int, Verdict]) -> None:
        """Waits for the next message or deadline and acts on whatever is due."""
        clocked = [worker.deadline for worker in self._workers if worker.row is not None or not worker.ready]
        patience_s = max(0.0, min(clocked) - time.monotonic()) if clocked else 0.0
        readable = wait([worker.connection for worker in self._workers], timeout=patience_s)
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            if worker.connection in readable:
                self._receive(index, worker, verdicts)
            elif (worker.row is not None or not worker.ready) and worker.deadline <= now:
                self._replace(index, worker, f"took longer than {self._timeout_s:g} s", verdicts)

    def _receive(self, index: int, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        """Takes one message: readiness, a verdict, or the end of the process."""
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            status = worker.process.wait()
            self._replace(index, worker, f"ended the worker process with status {status}", verdicts)
            return
        if kind == "ready":
            worker.ready = True
        elif kind == "unusable":
            raise ConfigError(content)
        elif worker.row is not None:
            verdicts[worker.row] = Verdict(reward=content) if kind == "ok" else Verdict(reward=0.0, failure=content)
            worker.row = None

    def _replace(self, index: int, worker: _Worker, reason: str, verdicts: dict[int, Verdict]) -> None:
        """Fails the worker's row and starts another worker in its place."""
        worker.kill()
        if not worker.ready:
            raise WorkerError(
                f"a reward worker did not start: importing {self._function} {reason} "
                f"(limit {START_LIMIT_S:g} s to import); see its output on stderr"
            )
        if worker.row is not None:
            verdicts[worker.row] = Verdict(reward=0.0, failure=reason)
        self._workers[index] = _Worker(self._function, self._timeout_s)


def _kill_all(workers: list[_Worker]) -> None:
    """Empties the list."""
    while workers:
        workers.pop().kill()
