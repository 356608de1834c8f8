"""A pool of grading processes with limits per row: a row that hangs or crashes only loses its own verdict."""

import contextlib
import itertools
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace

from gtpo_megatron.errors import WorkerError
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.rewards.grade import OUT_OF_MEMORY, Verdict
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.user_code.worker_handle import Cause, EpisodeEvent, WorkerExit, WorkerSettings
from gtpo_megatron.user_code.worker_pool import WorkerPool

DEFAULT_MEMORY_LIMIT_MIB = 4096
DEFAULT_ROWS_PER_CALL = 16

FREE_SHARE = 0.5
"""Fraction of a batch's time that is given to the first rows; the rest is divided equally."""

OVER_BUDGET = Verdict(
    "over_budget",
    failure="no time left: rows of its batch took what grading may take of cluster.stage_deadline_s; lower "
    "reward.timeout_s, or raise reward.num_workers",
)


class RewardPool:
    """Runs reward functions in worker processes, see :class:`~gtpo_megatron.user_code.worker_pool.WorkerPool`.

    Args:
        function: as in ``RewardConfig.function``.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit per row; after it the worker is replaced and the row has no verdict.
        memory_limit_mib: memory limit per row, including shared mappings and child processes; beyond it the row has no
            verdict. 0: no limit.
        most_rows: rows of a call of a batched or async function. Those of ``grade`` are cut into calls by their place
            alone; to a row of ``submit`` those are added that wait behind it.
        sandbox: as in ``RewardConfig.sandbox``.
        packages: as in ``RewardConfig.packages``.
        judge: as in ``RewardConfig.judge``.

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
        most_rows: int = DEFAULT_ROWS_PER_CALL,
        sandbox: str = "bubblewrap",
        packages: str = "",
        judge: JudgeSetup | None = None,
    ) -> None:
        settings = WorkerSettings(
            service="gtpo_megatron.rewards.reward_worker",
            arguments={
                "function": function,
                "timeout_s": timeout_s,
                "sandbox": sandbox,
                "packages": packages,
                "judge": asdict(judge or JudgeSetup()),
            },
            name=f"reward function {function!r}",
            kind="reward function",
            timeout_s=timeout_s,
            patience_s=0.0,
            memory_limit_mib=memory_limit_mib,
        )
        self._num_workers = num_workers
        self._calls = _Calls(settings)
        # Also if the pool is garbage-collected without close(), and at exit.
        self._end = weakref.finalize(self, self._calls.end)
        try:
            facts = self._calls.workers.start(num_workers)
        except BaseException:
            self.close()
            raise
        self._calls.rows_per_call = most_rows if facts["takes_several"] else 1

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers' current supervisors; workers are their children."""
        return self._calls.workers.supervisor_ids

    def submit(self, request: RewardRequest) -> "Future[Verdict]":
        """Queues a row; rows are graded in the order of submission.

        Raises:
            WorkerError: the pool is closed, or a worker did not start. The future raises it if one does not later.
        """
        row = _RewardRow(request.to_json())
        self._put(_Call((row,), takes_more=True))
        return row.verdict

    def grade(self, requests: Sequence[RewardRequest], *, budget_s: float | None = None) -> list[Verdict]:
        """Grades all rows; verdicts are in the order of the rows.

        Which rows a batched function is given together is decided before the first call: a reward that compares them
        is the same however busy the workers are, and for any number of them.

        Args:
            requests: the rows.
            budget_s: time for all rows, see ``BatchBudget``; rows after it have no verdict. None: no limit.

        Raises:
            WorkerError: the pool is closed, or a worker does not start.
        """
        budget = None
        if budget_s is not None:
            budget = BatchBudget(budget_s, num_rows=len(requests), num_workers=self._num_workers)
        rows = tuple(_RewardRow(request.to_json()) for request in requests)
        size = self._calls.rows_per_call
        try:
            for first in range(0, len(rows), size):
                self._put(_Call(rows[first : first + size], budget))
            return [row.verdict.result() for row in rows]
        finally:
            for row in rows:  # after an error or interrupt
                row.verdict.cancel()

    def _put(self, call: "_Call") -> None:
        if not self._end.alive:
            raise WorkerError("the reward pool is closed; make a new one")
        self._calls.put(call)

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()
        self._calls.workers.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


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


@dataclass(frozen=True, slots=True)
class _RewardRow:
    """A row, as JSON, and its verdict to come."""

    request: str
    verdict: "Future[Verdict]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that a worker is given together.

    Attributes:
        rows: at least one.
        budget: of the batch that they belong to.
        takes_more: it may become one call with those behind it that say so too.
        is_second: a worker that had it was killed or stopped from outside.
    """

    rows: tuple[_RewardRow, ...]
    budget: BatchBudget | None = None
    takes_more: bool = False
    is_second: bool = False

    @property
    def is_late(self) -> bool:
        """Whether its batch has no time left."""
        return self.budget is not None and time.monotonic() >= self.budget.deadline

    def deadline(self) -> float:
        """Time by which it must have ended, if it begins now and belongs to a batch."""
        assert self.budget is not None
        return max(self.budget.row_deadline() for _ in self.rows)

    def give(self, verdicts: Sequence[Verdict]) -> None:
        """Gives each row its verdict."""
        for row, verdict in zip(self.rows, verdicts, strict=True):
            row.verdict.set_result(verdict)

    def fail(self, error: BaseException) -> None:
        """Lets each row's future raise."""
        for row in self.rows:
            row.verdict.set_exception(error)


class _Calls:
    """The calls of a pool, each an episode of one step; it has no reference to the pool, which may be dropped.

    A call is tried again once if its worker was killed or stopped from outside, with the same rows: what they earn may
    depend on each other. If a call of several rows fails as a whole, its rows are graded one by one, so that only the
    row at fault has no verdict.

    Attributes:
        workers: that grade, one call each at a time.
        rows_per_call: most rows of a call.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.workers = WorkerPool(settings, self._take)
        self.rows_per_call = 1
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._again: deque[_Call] = deque()  # to be graded again, before all that wait
        self._running: dict[int, _Call] = {}

    def put(self, call: _Call) -> None:
        """Adds a call.

        Raises:
            WorkerError: a worker did not start.
        """
        with self.workers.lock:
            self.workers.check()
            self._waiting.append(call)
            self._assign()

    def end(self) -> None:
        """Ends the workers; rows that wait are cancelled, and those that a worker has raise."""
        self.workers.end()
        with self.workers.lock:
            self._fail(WorkerError("the reward pool was closed while it was grading"))

    def _assign(self) -> None:
        while self._waiting and self._waiting[0].is_late:  # it waits for no worker
            for row in self._waiting.popleft().rows:
                if row.verdict.set_running_or_notify_cancel():
                    row.verdict.set_result(OVER_BUDGET)
        while self.workers.num_idle and (call := self._next()) is not None:
            if call.is_late:
                call.give([OVER_BUDGET] * len(call.rows))
                continue
            number = next(self._numbers)
            self._running[number] = call
            body = f"[{','.join(row.request for row in call.rows)}]".encode()
            self.workers.open(number, body, deadline=None if call.budget is None else call.deadline)

    def _next(self) -> _Call | None:
        """The first call whose rows are not all cancelled, with as many behind it as it takes; None: there is none."""
        if self._again:
            return self._again.popleft()
        rows: list[_RewardRow] = []
        budget: BatchBudget | None = None
        with contextlib.suppress(IndexError):  # none is left
            while len(rows) < self.rows_per_call:
                call = self._waiting.popleft()
                budget = call.budget
                rows += [row for row in call.rows if row.verdict.set_running_or_notify_cancel()]
                if rows and not (call.takes_more and self._waiting[0].takes_more):
                    break
        return _Call(tuple(rows), budget) if rows else None

    def _take(self, event: EpisodeEvent | None) -> None:
        with self.workers.lock:
            if event is None:
                if self.workers.error is not None:
                    self._fail(self.workers.error)
                self._assign()
                return
            if (call := self._running.pop(event.episode, None)) is None:  # the pool was closed
                return
            verdicts = _verdicts(event, len(call.rows))
            kinds = {verdict.kind for verdict in verdicts}
            if "disturbed" in kinds and not call.is_second:
                self._again.appendleft(replace(call, is_second=True))
            elif len(call.rows) > 1 and kinds & {"call", "memory", "disturbed"}:
                self._again.extendleft(_Call((row,), call.budget) for row in reversed(call.rows))
            else:
                call.give(verdicts)
            self._assign()

    def _fail(self, error: BaseException) -> None:
        for call in (*self._running.values(), *self._again):
            call.fail(error)
        for call in self._waiting:
            for row in call.rows:
                row.verdict.cancel()
        self._running.clear()
        self._again.clear()
        self._waiting.clear()


def _verdicts(event: EpisodeEvent, num_rows: int) -> list[Verdict]:
    """The verdicts of a call; of one that has failed, why."""
    if event.exit is not None:
        return [_failed(event.exit)] * num_rows
    if event.failure:
        return [Verdict("call", failure=event.failure)] * num_rows
    return [Verdict(**verdict) for verdict in event.body["verdicts"]]


def _failed(how: WorkerExit) -> Verdict:
    """The verdict on rows whose worker has ended; it is disturbed where somebody else may have ended it."""
    if how.cause is Cause.OUT_OF_TIME:
        return OVER_BUDGET
    if how.cause is Cause.MEMORY:
        return Verdict("memory", failure=OUT_OF_MEMORY)
    if how.cause is Cause.LATE:
        return Verdict("disturbed" if how.was_stopped else "call", failure=f"took longer than {how.limit_s:g} s")
    if how.cause is Cause.DIED:
        is_disturbed = how.status == -signal.SIGKILL
        reason = f"ended the worker process with status {how.status}"
        return Verdict("disturbed" if is_disturbed else "call", failure=reason)
    return Verdict("call", failure=f"its worker {how.reason}")
