"""Pool of grading processes with limits per row: a row that hangs or crashes only loses its own verdict."""

import itertools
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gtpo_megatron.config.reward import JudgeConfig, RewardConfig
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.judge.store import STORE_FILE, begin_session
from gtpo_megatron.rewards.function import takes_several
from gtpo_megatron.rewards.grade import RewardCaller
from gtpo_megatron.rewards.request import OUT_OF_MEMORY, RewardRequest, Verdict
from gtpo_megatron.rewards.reward_worker import requests_of
from gtpo_megatron.user_code.worker_handle import Answer, Cause, WorkerExit, WorkerSettings
from gtpo_megatron.user_code.worker_pool import WorkerPool

FREE_SHARE = 0.5
"""Fraction of a batch's time that is given to the first rows; the rest is divided equally."""

OVER_BUDGET = Verdict(
    "over_budget",
    failure="no time left: rows of its batch took what grading may take of cluster.stage_deadline_s; lower "
    "reward.timeout_s, or raise reward.num_workers",
)


class RewardPool:
    """Grades responses with the reward functions of a run, in worker processes or in this one.

    A worker has one call at a time, of a row or of several. A call is made again once if its worker was killed or
    stopped from outside, with the same rows: what they earn may depend on each other. If a call of several rows fails
    as a whole, its rows are graded one by one, so that only the row at fault has no verdict.

    Args:
        config: functions and limits; without workers they are called in this process, without limits (tests,
            debugging).
        folder: place of the judge's answers; None: nowhere, and each worker has a budget of its own.
        responses_per_step: responses that share one of the judge's budgets; 0: all do.

    Raises:
        ConfigError: a function cannot be imported, or has another signature.
        DataError: the file of the judge's answers cannot be used.
        WorkerError: a worker does not start.
    """

    def __init__(self, config: RewardConfig, *, folder: Path | None = None, responses_per_step: int = 0) -> None:
        store = _judge_store(config.judge, folder)
        settings = WorkerSettings(
            service="gtpo_megatron.rewards.reward_worker",
            arguments={"config": asdict(config), "store": store},
            name=f"reward function {config.function!r}",
            kind="reward function",
            timeout_s=config.timeout_s,
            patience_s=0.0,
            memory_limit_mib=config.memory_limit_mib,
        )
        self._num_workers = config.num_workers
        self._responses_per_step = responses_per_step
        self._num_graded = 0
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        self._here: RewardCaller | None = None  # without workers
        self._workers = WorkerPool(settings, _weakly(self._take))
        # Also if the pool is garbage-collected without close(), and at exit.
        self._end = weakref.finalize(self, _end, self._workers, self._running, self._waiting)
        try:
            if config.num_workers:
                several = self._workers.start(config.num_workers)["takes_several"]
            else:
                self._here = RewardCaller(config, store=store)
                several = takes_several(self._here.functions)
        except BaseException:
            self.close()
            raise
        self._rows_per_call = config.rows_per_call if several else 1

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers' current supervisors; workers are their children."""
        return self._workers.supervisor_ids

    def submit(self, request: RewardRequest) -> "Future[Verdict]":
        """Queues a row, which is graded after those before it, with those behind it if a call may have several.

        Without workers it is graded at once.

        Raises:
            WorkerError: the pool is closed, or a worker did not start. The future raises it if one does not later.
        """
        row = _Row(request.to_json())
        self._put(_Call((row,), takes_more=True))
        return row.verdict

    def grade(self, requests: Sequence[RewardRequest], *, budget_s: float | None = None) -> list[Verdict]:
        """Grades all rows; verdicts are in the order of the rows.

        Which rows a batched function is given together is decided before the first call: a reward that compares them
        is the same however busy the workers are, and for any number of them.

        Args:
            requests: the rows, those of a group one after the other.
            budget_s: time for all rows, see ``BatchBudget``; rows after it have no verdict. None: no limit, as without
                workers.

        Raises:
            WorkerError: the pool is closed, or a worker does not start.
        """
        budget = None
        if budget_s is not None and self._num_workers:
            budget = BatchBudget(budget_s, num_rows=len(requests), num_workers=self._num_workers)
        rows = tuple(_Row(request.to_json()) for request in self._with_judge_budgets(requests))
        try:
            for first in range(0, len(rows), self._rows_per_call):
                self._put(_Call(rows[first : first + self._rows_per_call], budget))
            return [row.verdict.result() for row in rows]
        finally:
            for row in rows:  # after an error or interrupt
                row.verdict.cancel()

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()
        self._workers.join()
        if self._here is not None:
            self._here.close()
            self._here = None

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _with_judge_budgets(self, requests: Sequence[RewardRequest]) -> list[RewardRequest]:
        """Says which of the judge's budgets pays for each: a new one begins every ``responses_per_step``."""
        first = self._num_graded
        self._num_graded += len(requests)
        step = self._responses_per_step
        return [replace(one, judge_budget=index // step if step else 0) for index, one in enumerate(requests, first)]

    def _put(self, call: "_Call") -> None:
        with self._workers.lock:
            if not self._end.alive:
                raise WorkerError("the reward pool is closed; make a new one")
            self._workers.check()
            self._waiting.append(call)
            self._assign()

    def _assign(self) -> None:
        """Makes the calls for which there is a worker; those that are late wait for none."""
        while self._waiting and (self._waiting[0].is_late or self._here is not None or self._workers.num_idle):
            call = self._next()
            if call.is_late:
                call.give([OVER_BUDGET] * len(call.rows))
            elif call.rows and self._here is not None:
                self._settle(call, self._here.grade(requests_of(call.body)))
            elif call.rows:
                number = next(self._numbers)
                self._running[number] = call
                self._workers.open(number, call.body, deadline=None if call.budget is None else call.deadline)

    def _next(self) -> "_Call":
        """The first call, of its rows that are not cancelled, with as many behind it as it takes."""
        call = self._waiting.popleft()
        if call.is_again:
            return call
        rows = call.begun()
        while call.takes_more and len(rows) < self._rows_per_call and self._waiting and self._waiting[0].takes_more:
            rows += self._waiting.popleft().begun()
        return _Call(tuple(rows), call.budget)

    def _take(self, answer: Answer | None) -> None:
        """Takes the answer to a call, in its worker's thread; None: a worker is ready, or cannot start."""
        with self._workers.lock:
            if answer is None:
                if self._workers.error is not None:
                    _fail(self._workers.error, self._running, self._waiting)
            elif (call := self._running.pop(answer.session, None)) is not None:  # None after the pool was closed
                self._settle(call, _verdicts(answer, len(call.rows)))
            self._assign()

    def _settle(self, call: "_Call", verdicts: Sequence[Verdict]) -> None:
        """Gives the verdicts of a call to its rows, or lets these be graded again before all that wait."""
        kinds = {verdict.kind for verdict in verdicts}
        if "disturbed" in kinds and not call.was_disturbed:
            self._waiting.appendleft(replace(call, is_again=True, was_disturbed=True))
        elif len(call.rows) > 1 and kinds & {"call", "memory", "disturbed"}:
            self._waiting.extendleft(_Call((row,), call.budget, is_again=True) for row in reversed(call.rows))
        else:
            call.give(verdicts)


class BatchBudget:
    """The deadlines of a batch and of the calls that grade its rows.

    In the first half of the budget a call may take its whole limit, up to the end of that half. After it, a call may
    take at most its rows' equal shares of the time left, so that a few that hang do not use up the time of the others.

    Args:
        budget_s: seconds for all rows.
        num_rows: rows of the batch.
        num_workers: workers that grade at the same time.
        clock: monotonic seconds.

    Attributes:
        deadline: time by which the batch must have ended.
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

    def call_deadline(self, num_rows: int, *, is_again: bool = False) -> float:
        """Deadline of a call that begins now.

        Args:
            num_rows: rows of the call.
            is_again: whether they were counted before, in a call that is made again.
        """
        with self._lock:
            num_left = max(num_rows, self._num_left)
            if not is_again:
                self._num_left -= num_rows
        now = self._clock()
        share = now + max(0.0, self.deadline - now) * min(1.0, self._num_workers * num_rows / num_left)
        return max(share, self._free_until)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row, as JSON, and its verdict to come."""

    request: str
    verdict: "Future[Verdict]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that the functions are given together.

    Attributes:
        rows: rows of the call, at least one unless all were cancelled.
        budget: time of the batch that they belong to; None: no limit.
        takes_more: whether it may become one call with those behind it that take more too.
        is_again: whether its rows have been in another call.
        was_disturbed: whether a worker that had the same call was killed or stopped from outside.
    """

    rows: tuple[_Row, ...]
    budget: BatchBudget | None = None
    takes_more: bool = False
    is_again: bool = False
    was_disturbed: bool = False

    @property
    def is_late(self) -> bool:
        """Whether its batch has no time left."""
        return self.budget is not None and time.monotonic() >= self.budget.deadline

    @property
    def body(self) -> bytes:
        """The rows as JSON."""
        return f"[{','.join(row.request for row in self.rows)}]".encode()

    def deadline(self) -> float:
        """Time by which it must have ended, if it begins now and belongs to a batch."""
        assert self.budget is not None
        return self.budget.call_deadline(len(self.rows), is_again=self.is_again)

    def begun(self) -> list[_Row]:
        """The rows that are not cancelled, and cannot be from now on."""
        return [row for row in self.rows if row.verdict.set_running_or_notify_cancel()]

    def give(self, verdicts: Sequence[Verdict]) -> None:
        """Gives each row its verdict."""
        for row, verdict in zip(self.rows, verdicts, strict=True):
            row.verdict.set_result(verdict)


def _weakly(take: Callable[[Answer | None], None]) -> Callable[[Answer | None], None]:
    """Calls a method as long as its object is there: the workers' threads must not keep a pool that was dropped."""
    method = weakref.WeakMethod(take)

    def call(answer: Answer | None) -> None:
        if (found := method()) is not None:
            found(answer)

    return call


def _end(workers: WorkerPool, running: dict[int, _Call], waiting: deque[_Call]) -> None:
    """Ends the workers of a pool and fails its calls; without the pool itself, which may have been dropped."""
    workers.end()
    with workers.lock:
        _fail(WorkerError("the reward pool was closed while it was grading"), running, waiting)


def _fail(error: BaseException, running: dict[int, _Call], waiting: deque[_Call]) -> None:
    """Lets the futures of all rows raise, but those that were cancelled."""
    calls: Iterable[_Call] = (*running.values(), *waiting)
    for row in (row for call in calls for row in call.rows):
        if row.verdict.running() or row.verdict.set_running_or_notify_cancel():
            row.verdict.set_exception(error)
    running.clear()
    waiting.clear()


def _judge_store(config: JudgeConfig, folder: Path | None) -> str:
    """Path of the judge's answers, whose budgets begin anew; "" if they are neither stored nor counted."""
    if not config.url or folder is None or not (config.cache or config.calls_per_step):
        return ""
    begin_session(folder / STORE_FILE)
    return str(folder / STORE_FILE)


def _verdicts(answer: Answer, num_rows: int) -> list[Verdict]:
    """The verdicts of a call; of one that has failed, why."""
    if answer.exit is not None:
        return [_failed(answer.exit)] * num_rows
    if answer.failure:
        return [Verdict("call", failure=answer.failure)] * num_rows
    return [Verdict(**verdict) for verdict in answer.body["verdicts"]]


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
