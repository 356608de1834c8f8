"""A pool of grading processes with limits per row: a row that hangs or crashes only loses its own verdict."""

import contextlib
import queue
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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
        most_rows: rows that a batched or async function is given at once.
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
        self._waiting: deque[_Waiting] = deque()
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

    def submit(self, request: RewardRequest, *, budget: BatchBudget | None = None) -> "Future[Verdict]":
        """Queues a row; rows are graded in the order of submission.

        Args:
            request: the row.
            budget: of the batch that it belongs to.

        Raises:
            WorkerError: the pool is closed. The future raises it if a replacement worker does not start.
        """
        if not self._end.alive:
            raise WorkerError("the reward pool is closed; make a new one")
        verdict: Future[Verdict] = Future()
        self._waiting.append((request, verdict, budget))
        self._threads.submit(_grade_next, self._idle, self._waiting, self._rows_per_call)
        return verdict

    def grade(self, requests: Sequence[RewardRequest], *, budget_s: float | None = None) -> list[Verdict]:
        """Grades all rows; verdicts are in the order of the rows.

        Args:
            requests: the rows.
            budget_s: time for all rows, see ``BatchBudget``; rows after it have no verdict. None: no limit.

        Raises:
            WorkerError: the pool is closed, or a replacement worker does not start.
        """
        budget = None
        if budget_s is not None:
            budget = BatchBudget(budget_s, num_rows=len(requests), num_workers=len(self._workers))
        rows = [self.submit(request, budget=budget) for request in requests]
        try:
            return [row.result() for row in rows]
        finally:
            for row in rows:  # after an error or interrupt
                row.cancel()

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_Waiting = tuple[RewardRequest, "Future[Verdict]", BatchBudget | None]
"""A row that no worker has taken yet."""


def _grade_next(idle: "queue.SimpleQueue[WorkerProcess]", waiting: "deque[_Waiting]", most: int) -> None:
    """Grades the next waiting rows with an idle worker; there are as many threads as workers, so one is idle.

    It is called once per row. With several rows per call, some calls find nothing left.
    """
    rows = _taken(waiting, most)
    if not rows:
        return
    worker = idle.get()
    try:
        found = worker.grade([request for request, _, _ in rows], budget=rows[0][2])
        for (_, verdict, _), one in zip(rows, found, strict=True):
            verdict.set_result(one)
    except BaseException as error:  # noqa: BLE001 - the caller of each row gets it
        for _, verdict, _ in rows:
            verdict.set_exception(error)
    finally:
        idle.put(worker)


def _taken(waiting: "deque[_Waiting]", most: int) -> list[_Waiting]:
    """The first rows that are not cancelled, of one budget."""
    rows: list[_Waiting] = []
    while len(rows) < most:
        try:
            row = waiting.popleft()
        except IndexError:
            break
        if rows and row[2] is not rows[0][2]:
            waiting.appendleft(row)
            break
        if row[1].set_running_or_notify_cancel():
            rows.append(row)
    return rows


def _end_all(workers: Sequence[WorkerProcess], threads: ThreadPoolExecutor, waiting: "deque[_Waiting]") -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    while waiting:
        with contextlib.suppress(IndexError):  # a thread may have taken the last row
            waiting.popleft()[1].cancel()
    for worker in workers:
        worker.end()
