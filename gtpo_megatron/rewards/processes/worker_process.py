"""The pool's side of one grading process, which is replaced when it dies or exceeds a limit."""

import math
import signal
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
from gtpo_megatron.supervision.supervised_process import EXIT_PATIENCE_S, START_LIMIT_S, SupervisedProcess

WATCH_EVERY_S = 0.2
"""Interval of memory readings during a row; a shorter row is not measured."""

ASYNC_PATIENCE_S = 1.0
"""Time in which a function that is async ends its late rows itself, before its process is replaced."""

FREE_SHARE = 0.5
"""Fraction of a batch's time that is given to the first rows; the rest is divided equally."""

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
        return self._child.process.supervisor_id

    def grade(self, requests: Sequence[RewardRequest], *, budget: BatchBudget | None = None) -> list[Verdict]:
        """Grades the rows of one call within its limits.

        A call is tried again once if the process was killed or stopped from outside, with the same rows: what they earn
        may depend on each other. If a call of several rows fails as a whole, its rows are graded one by one, so that
        only the row at fault has no verdict.

        Args:
            requests: at least one row.
            budget: the budget of their batch; a row beyond its deadline has no verdict.

        Raises:
            WorkerError: the process does not start, or the pool was closed.
            ConfigError: it cannot import the function.
        """
        verdicts = self._call(requests, budget)
        if any(verdict.kind == "disturbed" for verdict in verdicts):
            verdicts = self._call(requests, budget)
        if len(requests) > 1 and any(verdict.kind in ("call", "memory", "disturbed") for verdict in verdicts):
            return [self.grade([request], budget=budget)[0] for request in requests]
        return verdicts

    def _call(self, requests: Sequence[RewardRequest], budget: BatchBudget | None) -> list[Verdict]:
        batch_deadline = math.inf if budget is None else budget.deadline
        ready = self.wait_until_ready(batch_deadline) if time.monotonic() < batch_deadline else None
        if ready is None:
            return [OVER_BUDGET] * len(requests)
        child, was_sent = self._child, False
        child.process.output.pass_on(is_new=True)
        try:
            child.connection.send(requests)
            was_sent = True
            began, limit_s = time.monotonic(), self._limits.timeout_s
            patience_s = ASYNC_PATIENCE_S if ready.is_async else 0.0
            share = math.inf if budget is None else max(budget.row_deadline() for _ in requests)
            found = child.receive(min(began + limit_s + patience_s, share), watched=ready.process_id)
            if isinstance(found, float):  # its rows may take longer
                limit_s = found
                found = child.receive(min(began + limit_s + patience_s, share), watched=ready.process_id)
        except (EOFError, OSError):
            status = self._replace(patience_s=EXIT_PATIENCE_S)
            # it may have died while it was idle, not because of these rows
            is_disturbed = status == -signal.SIGKILL or not was_sent
            found = _failed(f"ended the worker process with status {status}", is_disturbed=is_disturbed)
        else:
            if found is None:
                stat = process_stat(ready.process_id)
                reason = f"took longer than {limit_s:g} s"
                late = _failed(reason, is_disturbed=stat is not None and stat.state == "T")
                found = late if share >= began + limit_s + patience_s else OVER_BUDGET
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
            reason = f"ended the process with status {child.process.end(EXIT_PATIENCE_S)}"
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
            self._child.process.end()

    def _replace(self, *, patience_s: float = 0.0) -> int:
        """Replaces the process; returns the exit status of the old one, which may take so long to end itself."""
        status = self._child.process.end(patience_s)
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
        process: it, its supervisor and its output.
        connection: to the worker.
        ready: its first message, once that has come.
        start_deadline: by when that must come.
        memory_limit: bytes that the worker and its descendants may have, including shared mappings.
    """

    def __init__(self, limits: Limits) -> None:
        self.connection, theirs = Pipe()
        self.ready: Ready | None = None
        self.memory_limit = math.inf
        with theirs:
            self.process = SupervisedProcess(
                "gtpo_megatron.rewards.processes.worker",
                {"limits": asdict(limits)},
                descriptor=theirs.fileno(),
                what="the reward function",
            )
        self.start_deadline = time.monotonic() + START_LIMIT_S

    def receive(self, deadline: float, *, watched: int = 0) -> Any:
        """The next message; None at the deadline. Forwards printed output meanwhile.

        Args:
            deadline: of ``time.monotonic``.
            watched: process whose memory is measured; the message is a verdict if it exceeds its limit.

        Raises:
            EOFError: the process has closed its end.
        """
        output = self.process.output
        sources: list[Any] = [self.connection, output.descriptor]
        while (left := deadline - time.monotonic()) > 0:
            ready = wait(sources, min(left, WATCH_EVERY_S) if watched else left)
            if output.descriptor in ready and not output.pass_on():
                sources.remove(output.descriptor)
            if self.connection in ready:
                message = self.connection.recv()
                output.pass_on()  # output was written before the message
                return message
            if not ready and watched and self.memory_limit < math.inf and memory_bytes(watched) > self.memory_limit:
                return Verdict("memory", failure=OUT_OF_MEMORY)
        return None
