"""A pool of grading processes with limits per row: a row that hangs or crashes only loses its own verdict."""

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.rewards.grade import Verdict
from gtpo_megatron.rewards.processes.worker_process import BatchBudget, Limits, WorkerProcess
from gtpo_megatron.rewards.request import RewardRequest

DEFAULT_MEMORY_LIMIT_MIB = 4096
DEFAULT_ROWS_PER_CALL = 16


class RewardPool:
    """Runs reward functions in child processes.

    Children are new interpreters that import the function by name, so the pool works in scripts, tests and Ray actors.
    They and all their descendants end with the parent, even if it is killed. Each is served by one thread.

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
        if num_workers < 1 or timeout_s <= 0 or memory_limit_mib < 0:
            raise ConfigError(
                f"num_workers={num_workers}, timeout_s={timeout_s}, memory_limit_mib={memory_limit_mib}: need at least "
                f"1 worker, more than 0 s and at least 0 MiB"
            )
        limits = Limits(
            function=function,
            timeout_s=timeout_s,
            memory_limit_mib=memory_limit_mib,
            sandbox=sandbox,
            packages=packages,
            judge=judge or JudgeSetup(),
        )
        self._waiting = _WaitingCalls()
        self._workers = [WorkerProcess(limits) for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # Also if the pool is garbage-collected without close(), and at exit.
        self._end = weakref.finalize(self, _end_all, self._workers, self._threads, self._waiting)
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._rows_per_call = 1
        try:
            for worker in self._workers:
                ready = worker.wait_until_ready()
                self._rows_per_call = most_rows if ready is not None and ready.takes_several else 1
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers' current supervisors; workers are their children."""
        return [worker.supervisor_id for worker in self._workers]

    def submit(self, request: RewardRequest) -> "Future[Verdict]":
        """Queues a row; rows are graded in the order of submission.

        Raises:
            WorkerError: the pool is closed. The future raises it if a replacement worker does not start.
        """
        row = _Row(request)
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
            WorkerError: the pool is closed, or a replacement worker does not start.
        """
        budget = None
        if budget_s is not None:
            budget = BatchBudget(budget_s, num_rows=len(requests), num_workers=len(self._workers))
        rows = tuple(_Row(request) for request in requests)
        try:
            for first in range(0, len(rows), self._rows_per_call):
                self._put(_Call(rows[first : first + self._rows_per_call], budget))
            return [row.verdict.result() for row in rows]
        finally:
            for row in rows:  # after an error or interrupt
                row.verdict.cancel()

    def _put(self, call: "_Call") -> None:
        if not self._end.alive:
            raise WorkerError("the reward pool is closed; make a new one")
        self._waiting.put(call)
        self._threads.submit(_grade_next, self._idle, self._waiting, self._rows_per_call)

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Row:
    request: RewardRequest
    verdict: "Future[Verdict]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that a worker is given together.

    Attributes:
        rows: at least one.
        budget: of the batch that they belong to.
        takes_more: it may become one call with those behind it that say so too.
    """

    rows: tuple[_Row, ...]
    budget: BatchBudget | None = None
    takes_more: bool = False


class _WaitingCalls:
    """Calls that no worker has taken yet, in the order of submission."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        self._taking = threading.Lock()

    def put(self, call: _Call) -> None:
        self._calls.append(call)

    def take(self, most_rows: int) -> _Call | None:
        """The first call whose rows are not all cancelled, with as many behind it as it takes; None: there is none."""
        rows: list[_Row] = []
        budget: BatchBudget | None = None
        with self._taking, contextlib.suppress(IndexError):  # none is left
            while len(rows) < most_rows:
                call = self._calls.popleft()
                budget = call.budget
                rows += [row for row in call.rows if row.verdict.set_running_or_notify_cancel()]
                if rows and not (call.takes_more and self._calls[0].takes_more):
                    break
        return _Call(tuple(rows), budget) if rows else None

    def cancel_all(self) -> None:
        """Without the lock: the garbage collector may call it in a thread that is taking."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                for row in self._calls.popleft().rows:
                    row.verdict.cancel()


def _grade_next(idle: "queue.SimpleQueue[WorkerProcess]", waiting: _WaitingCalls, most_rows: int) -> None:
    """Grades the next waiting rows with an idle worker; there are as many threads as workers, so one is idle.

    It is called once per submitted call. Where rows were added to another's call, some find nothing left.
    """
    call = waiting.take(most_rows)
    if call is None:
        return
    worker = idle.get()
    try:
        found = worker.grade([row.request for row in call.rows], budget=call.budget)
        for row, one in zip(call.rows, found, strict=True):
            row.verdict.set_result(one)
    except BaseException as error:  # noqa: BLE001 - the caller of each row gets it
        for row in call.rows:
            row.verdict.set_exception(error)
    finally:
        idle.put(worker)


def _end_all(workers: Sequence[WorkerProcess], threads: ThreadPoolExecutor, waiting: _WaitingCalls) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    waiting.cancel_all()
    for worker in workers:
        worker.end()
