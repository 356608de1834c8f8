"""The pool's side of one grading process: a row in, a verdict out, within limits; replaced when it dies."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.rewards.budget import BatchBudget
from gtpo_megatron.rewards.process_tree import END_PATIENCE_S, is_stopped, memory_bytes
from gtpo_megatron.rewards.worker import OUT_OF_MEMORY

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the reward function; generous, because a cold file system is slow."""

EXIT_PATIENCE_S = 1.0
"""A process whose pipe is closed ends by itself within this time, or is killed."""

WATCH_EVERY_S = 0.2
"""Between two looks at the memory of a row that takes long; a row that is quicker is not looked at."""

PRINTED_BYTES = 10_000
"""What a row may print, whichever way; the rest is read and left out, so that no reward fills the log."""

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
told = json.loads(sys.argv[1])
from gtpo_megatron.rewards.supervisor import supervise
supervise(control=told["control"], connection=told["descriptor"], parent=told["parent"])
from gtpo_megatron.rewards.worker import main
main()
"""
"""Gives the child its parent's module path, so that every function the parent can name the child can import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One row's outcome.

    Attributes:
        reward: what the function returned; 0 without a verdict.
        failure: why there is no verdict; None where there is one.
        is_over_budget: it is because the batch's time was spent.
    """

    reward: float
    failure: str | None = None
    is_over_budget: bool = False


OVER_BUDGET = Verdict(
    reward=0.0,
    failure="no time left: rows of its batch took what grading may take of cluster.stage_deadline_s; lower "
    "reward.timeout_s, or raise reward.num_workers",
    is_over_budget=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a worker is held to: the function, seconds a row, and MiB a row beyond what importing took."""

    function: str
    timeout_s: float
    memory_limit_mib: int


class WorkerProcess:
    """One child process, replaced when it dies or must be killed. Used by one thread at a time; ``end`` by any."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # a process is started and ended under it, so that none slips through
        self._has_ended = False
        self._was_disturbed = False
        self._connection: Connection[Any, Any]
        self._output: _Output
        self._control: int
        self._is_running: bool
        self._is_ready: bool
        self._start_deadline: float
        self._memory_at_start: int
        self._process: subprocess.Popen[bytes]
        self._worker_id: int
        self._start()

    @property
    def supervisor_id(self) -> int:
        """Process id; the worker is below it."""
        return self._process.pid

    def grade(self, response: str, answer: str, *, budget: BatchBudget | None = None) -> Verdict:
        """One row, within its limits; once more if somebody else has killed or stopped the process meanwhile.

        A row that ends its process in that way by itself does so again.

        Args:
            response: to judge.
            answer: the reference.
            budget: of its batch; a row past its share has no verdict.

        Raises:
            WorkerError: the process does not start, or the pool was closed meanwhile.
            ConfigError: it cannot import the function.
        """
        verdict = self._grade_once(response, answer, budget)
        return self._grade_once(response, answer, budget) if self._was_disturbed else verdict

    def _grade_once(self, response: str, answer: str, budget: BatchBudget | None) -> Verdict:
        self._was_disturbed = False
        batch_deadline = None if budget is None else budget.deadline
        if not self.wait_until_ready(batch_deadline):
            return OVER_BUDGET
        self._output.begin_row()
        try:
            self._connection.send((response, answer))
        except OSError:  # it died idle, which is not this row's fault
            self._replace()
            if not self.wait_until_ready(batch_deadline):
                return OVER_BUDGET
            self._connection.send((response, answer))
        deadline = time.monotonic() + self._limits.timeout_s
        share = deadline if budget is None else budget.row_deadline()
        try:
            reply = self._receive(min(deadline, share), watch_memory=True)
        except (EOFError, OSError):
            status = self._replace(patience_s=EXIT_PATIENCE_S)
            self._was_disturbed = status == -signal.SIGKILL
            return Verdict(reward=0.0, failure=f"ended the worker process with status {status}")
        if reply is None:
            self._was_disturbed = share >= deadline and is_stopped(self._worker_id)
            self._replace()
            late = Verdict(reward=0.0, failure=f"took longer than {self._limits.timeout_s:g} s")
            return OVER_BUDGET if share < deadline else late
        kind, content = reply
        if kind == "memory":  # what the row left behind may be in the next one's way
            self._replace()
        return Verdict(reward=content) if kind == "ok" else Verdict(reward=0.0, failure=content)

    def wait_until_ready(self, deadline: float | None = None) -> bool:
        """Returns when the function is imported, or False at the deadline.

        Raises:
            WorkerError: the process ended, or took too long.
            ConfigError: it cannot import the function.
        """
        if self._is_ready:
            return True
        reason = f"took longer than {START_LIMIT_S:g} s"
        deadline = self._start_deadline if deadline is None else min(deadline, self._start_deadline)
        try:
            reply = self._receive(deadline)
        except (EOFError, OSError):
            reason = f"ended the process with status {self._exit_status(EXIT_PATIENCE_S)}"
        else:
            if reply is not None:
                kind, content = reply
                if kind == "unusable":
                    raise ConfigError(content)
                self._is_ready, self._worker_id = True, content
                self._memory_at_start = memory_bytes(self._worker_id)
                return True
            if deadline < self._start_deadline:
                return False
        self.end()
        raise WorkerError(
            f"a reward worker did not start: importing {self._limits.function} {reason}; see its output on stderr"
        )

    def end(self) -> None:
        """Ends the process and all it started; it is not replaced any more."""
        with self._lock:
            self._has_ended = True
            self._kill()

    def _receive(self, deadline: float, *, watch_memory: bool = False) -> tuple[str, Any] | None:
        """The next message; None at the deadline. Passes on what is printed meanwhile.

        Raises:
            EOFError: the process has closed its end.
        """
        watched: list[Any] = [self._connection, self._output.descriptor]
        while (left := deadline - time.monotonic()) > 0:
            ready = wait(watched, min(left, WATCH_EVERY_S) if watch_memory else left)
            if self._output.descriptor in ready and not self._output.pass_on():
                watched.remove(self._output.descriptor)
            if self._connection in ready:
                message: tuple[str, Any] = self._connection.recv()
                self._output.pass_on()  # it was written before
                return message
            if not ready and watch_memory and self._is_too_large():
                return "memory", OUT_OF_MEMORY
        return None

    def _is_too_large(self) -> bool:
        """Whether the worker and all it started hold more than a row may take, shared mappings included."""
        limit = self._limits.memory_limit_mib << 20
        return limit > 0 and memory_bytes(self._worker_id) - self._memory_at_start > limit

    def _start(self) -> None:
        with self._lock:
            if self._has_ended:
                raise WorkerError("the reward pool was closed while it was grading")
            self._connection, theirs = Pipe()
            control, self._control = os.pipe()
            output, printed = os.pipe()
            self._output = _Output(output)
            told = {
                "descriptor": theirs.fileno(),
                "control": control,
                "parent": os.getpid(),
                "function": self._limits.function,
                "memory_limit_mib": self._limits.memory_limit_mib,
            }
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-c", _BOOTSTRAP),
                        *(json.dumps([str(entry) for entry in sys.path]), json.dumps(told)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,  # what a reward prints is no part of our caller's output
                    stderr=printed,
                    pass_fds=[theirs.fileno(), control],
                    start_new_session=True,  # Ctrl-C is for the parent
                )
            finally:
                theirs.close()
                os.close(control)
                os.close(printed)
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
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.debug("reward worker under %d is killed", self._process.pid)
        with self._lock:
            self._kill()
        return self._process.returncode

    def _kill(self) -> None:
        if not self._is_running:
            return  # by now the number may be another process's
        self._is_running = False
        os.close(self._control)  # the supervisor ends everything below it, then itself
        try:
            self._process.wait(2 * END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor %d of a reward worker does not answer and is killed", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


class _Output:
    """What a worker and its children print: the first bytes of each row go to our stderr, the rest nowhere.

    Args:
        descriptor: the reading end of their pipe; owned by this object.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._left = PRINTED_BYTES
        self._lock = threading.Lock()  # the pool may be closed while a row runs
        self._is_open = True

    def begin_row(self) -> None:
        """The limit starts anew; what came since the last row counts to that."""
        self.pass_on()
        self._left = PRINTED_BYTES

    def pass_on(self) -> bool:
        """Reads what there is; False once nobody can write any more."""
        with self._lock:
            return self._is_open and self._pass_on()

    def _pass_on(self) -> bool:
        for _ in range(16):  # a megabyte, then whoever waits for a verdict looks for that
            try:
                text = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not text:
                return False
            if self._left > 0:
                _write_to_stderr(text[: self._left])
                if len(text) > self._left:
                    _write_to_stderr(f"\n[the reward function printed more than {PRINTED_BYTES} bytes: cut]\n".encode())
            self._left -= len(text)
        return True

    def close(self) -> None:
        """Passes on the last words; a second call does nothing."""
        with self._lock:
            if self._is_open:
                self._pass_on()
                self._is_open = False
                os.close(self.descriptor)


def _write_to_stderr(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or there is no room: no reason to lose a verdict
        while text:
            text = text[os.write(2, text) :]
