"""The pool's side of one grading process, which is replaced when it dies or exceeds a limit."""

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.rewards.grade import OUT_OF_MEMORY, Verdict
from gtpo_megatron.rewards.processes.worker import Ready
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.supervision.process_tree import memory_bytes, process_stat
from gtpo_megatron.supervision.worker import END_PATIENCE_S

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the reward function; generous, because a cold file system is slow."""

EXIT_PATIENCE_S = 1.0
"""Time for a process to end after its pipe was closed, before it is killed."""

WATCH_EVERY_S = 0.2
"""Interval of memory readings during a row; a shorter row is not measured."""

ASYNC_PATIENCE_S = 1.0
"""Time in which a function that is async ends its late rows itself, before its process is replaced."""

PRINTED_BYTES = 10_000
"""Limit of a row's output; the rest is dropped."""

FREE_SHARE = 0.5
"""Fraction of a batch's time that is given to the first rows; the rest is divided equally."""

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
told = json.loads(sys.argv[1])
from gtpo_megatron.supervision.worker import supervise
supervise(control=told["control"], connection=told["descriptor"], parent=told["parent"])
from gtpo_megatron.rewards.processes.worker import main
main()
"""
"""Sets the parent's module path in the child, so that it can import the same functions."""

OVER_BUDGET = Verdict(
    "over_budget",
    failure="no time left: rows of its batch took what grading may take of cluster.stage_deadline_s; lower "
    "reward.timeout_s, or raise reward.num_workers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Functions and limits of a worker, as in ``RewardConfig``; ``memory_limit_mib`` is beyond that after import."""

    function: str
    timeout_s: float
    memory_limit_mib: int
    sandbox: str
    packages: str
    judge: JudgeSetup = field(default_factory=JudgeSetup)


class BatchBudget:
    """The deadlines of a batch and of its rows.

    In the first half of the budget a row may take its whole limit, up to the end of that half. After it, a row may take
    at most an equal fraction of the time left, so that a few rows that hang do not use up the time of the others.

    Args:
        budget_s: seconds for all rows.
        num_rows: rows of the batch.
        num_workers: workers that grade at the same time.
        clock: monotonic seconds.

    Attributes:
        deadline: of the batch.
    """

    def __init__(
        self, budget_s: float, *, num_rows: int, num_workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._free_until = clock() + FREE_SHARE * budget_s
        self.deadline = clock() + budget_s
        self._num_left = num_rows
        self._num_workers = num_workers
        self._lock = threading.Lock()

    def row_deadline(self) -> float:
        """Deadline of a row that begins now; call it once per row."""
        with self._lock:
            num_left = max(1, self._num_left)
            self._num_left -= 1
        now = self._clock()
        share = now + max(0.0, self.deadline - now) * min(1.0, self._num_workers / num_left)
        return max(share, self._free_until)


class WorkerProcess:
    """One grading process after the other. One thread at a time may use it; any may call ``end``."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._has_ended = False
        self._child = _Child(limits)

    @property
    def supervisor_id(self) -> int:
        """Process id of the supervisor, whose child the worker is."""
        return self._child.process.pid

    def grade(self, requests: Sequence[RewardRequest], *, budget: BatchBudget | None = None) -> list[Verdict]:
        """Grades the rows of one call within its limits.

        A call of one row is tried again once if the process was killed or stopped from outside. If a call of several
        rows fails as a whole, its rows are graded one by one, so that only the row at fault has no verdict.

        Args:
            requests: at least one row.
            budget: the budget of their batch; a row beyond its deadline has no verdict.

        Raises:
            WorkerError: the process does not start, or the pool was closed.
            ConfigError: it cannot import the function.
        """
        verdicts = self._call(requests, budget)
        kinds = {verdict.kind for verdict in verdicts}
        if len(requests) == 1:
            return self._call(requests, budget) if "disturbed" in kinds else verdicts
        if kinds & {"call", "memory", "disturbed"}:
            return [self.grade([request], budget=budget)[0] for request in requests]
        return verdicts

    def _call(self, requests: Sequence[RewardRequest], budget: BatchBudget | None) -> list[Verdict]:
        batch_deadline = math.inf if budget is None else budget.deadline
        ready = self.wait_until_ready(batch_deadline) if time.monotonic() < batch_deadline else None
        if ready is None:
            return [OVER_BUDGET] * len(requests)
        child, was_sent = self._child, False
        child.output.pass_on(is_new_row=True)
        try:
            child.connection.send(requests)
            was_sent = True
            limit = time.monotonic() + self._limits.timeout_s + (ASYNC_PATIENCE_S if ready.is_async else 0.0)
            share = limit if budget is None else max(budget.row_deadline() for _ in requests)
            found = child.receive(min(limit, share), watched=ready.process_id)
        except (EOFError, OSError):
            status = self._replace(patience_s=EXIT_PATIENCE_S)
            # it may have died while it was idle, not because of these rows
            is_disturbed = status == -signal.SIGKILL or not was_sent
            found = _failed(f"ended the worker process with status {status}", is_disturbed=is_disturbed)
        else:
            if found is None:
                stat = process_stat(ready.process_id)
                reason = f"took longer than {self._limits.timeout_s:g} s"
                late = _failed(reason, is_disturbed=stat is not None and stat.state == "T")
                found = late if share >= limit else OVER_BUDGET
                self._replace()
        verdicts = [found] * len(requests) if isinstance(found, Verdict) else found
        if any(verdict.kind == "memory" for verdict in verdicts):
            self._replace()  # which frees memory that the rows left allocated
        return verdicts

    def wait_until_ready(self, deadline: float = math.inf) -> Ready | None:
        """Waits until the function is imported; None at the deadline.

        Raises:
            WorkerError: the process ended, or took too long.
            ConfigError: it cannot import the function.
        """
        child, reason = self._child, f"took longer than {START_LIMIT_S:g} s"
        if child.ready is not None:
            return child.ready
        try:
            told = child.receive(min(deadline, child.start_deadline))
        except (EOFError, OSError):
            reason = f"ended the process with status {child.end(EXIT_PATIENCE_S)}"
        else:
            if isinstance(told, str):
                raise ConfigError(told)
            if told is not None:
                child.ready, child.memory_limit = told, math.inf
                if self._limits.memory_limit_mib:
                    child.memory_limit = memory_bytes(told.process_id) + (self._limits.memory_limit_mib << 20)
                return child.ready
            if deadline < child.start_deadline:
                return None
        self.end()
        raise WorkerError(
            f"a reward worker did not start: importing {self._limits.function} {reason}; see its output on stderr"
        )

    def end(self) -> None:
        """Ends the process and its descendants, without a replacement."""
        with self._lock:
            self._has_ended = True
            self._child.end()

    def _replace(self, *, patience_s: float = 0.0) -> int:
        """Replaces the process; returns the exit status of the old one, which may take so long to end itself."""
        status = self._child.end(patience_s)
        self._child.connection.close()
        with self._lock:
            if self._has_ended:
                raise WorkerError("the reward pool was closed while it was grading")
            self._child = _Child(self._limits)
        return status


def _failed(reason: str, *, is_disturbed: bool) -> Verdict:
    return Verdict("disturbed" if is_disturbed else "call", failure=reason)


class _Child:
    """A grading process under its supervisor.

    Attributes:
        process: the supervisor.
        connection: to the worker.
        output: what the worker prints.
        ready: its first message, once that has come.
        start_deadline: by when that must come.
        memory_limit: bytes that the worker and its descendants may have, including shared mappings.
    """

    def __init__(self, limits: Limits) -> None:
        self.connection, theirs = Pipe()
        control, self._control = os.pipe()
        output, printed = os.pipe()
        self.output = _Output(output)
        self.ready: Ready | None = None
        self.memory_limit = math.inf
        self._lock = threading.Lock()
        told = {"descriptor": theirs.fileno(), "control": control, "parent": os.getpid(), "limits": asdict(limits)}
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOTSTRAP),
                    *(json.dumps([str(entry) for entry in sys.path]), json.dumps(told)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=printed,  # a reward's output must not mix with the caller's
                stderr=printed,
                pass_fds=[theirs.fileno(), control],
                process_group=0,  # Ctrl-C is for the parent
            )
        finally:
            theirs.close()
            os.close(control)
            os.close(printed)
        self.start_deadline = time.monotonic() + START_LIMIT_S

    def receive(self, deadline: float, *, watched: int = 0) -> Any:
        """The next message; None at the deadline. Forwards printed output meanwhile.

        Args:
            deadline: time of ``time.monotonic``.
            watched: process whose memory is measured; the message is a verdict if it exceeds its limit.

        Raises:
            EOFError: the process has closed its end.
        """
        sources: list[Any] = [self.connection, self.output.descriptor]
        while (left := deadline - time.monotonic()) > 0:
            ready = wait(sources, min(left, WATCH_EVERY_S) if watched else left)
            if self.output.descriptor in ready and not self.output.pass_on():
                sources.remove(self.output.descriptor)
            if self.connection in ready:
                message = self.connection.recv()
                self.output.pass_on()  # output was written before the message
                return message
            if not ready and watched and self.memory_limit < math.inf and memory_bytes(watched) > self.memory_limit:
                return Verdict("memory", failure=OUT_OF_MEMORY)
        return None

    def end(self, patience_s: float = 0.0) -> int:
        """Ends it with its descendants, unless it ends itself within ``patience_s``; returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with self._lock:
            if self._control >= 0:
                os.close(self._control)  # the supervisor ends everything below it, then itself
                self._control = -1
                try:
                    self.process.wait(2 * END_PATIENCE_S)
                except subprocess.TimeoutExpired:
                    logger.warning("the supervisor %d of a reward worker does not answer", self.process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.process.pid, signal.SIGKILL)
                self.output.close()
        return self.process.wait()


class _Output:
    """Forwards the first bytes that a row prints to our stderr, and drops the rest.

    Args:
        descriptor: the reading end of the worker's pipe; owned by this object.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._left = PRINTED_BYTES
        self._lock = threading.Lock()  # the pool may be closed while a row runs
        self._is_open = True

    def pass_on(self, *, is_new_row: bool = False) -> bool:
        """Reads available output, which belongs to the row before if a new one begins; False at its end."""
        with self._lock:
            goes_on = self._is_open and self._pass_on()
            self._left = PRINTED_BYTES if is_new_row else self._left
            return goes_on

    def _pass_on(self) -> bool:
        for _ in range(16):  # at most a megabyte, so that the wait for a verdict continues
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
        """Forwards the last output."""
        with self._lock:
            self._pass_on()
            self._is_open = False
            os.close(self.descriptor)


def _write_to_stderr(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a failed write must not lose a verdict
        while text:
            text = text[os.write(2, text) :]
