"""Grading processes with limits a row: a row that hangs costs its time limit once, a crash costs one verdict."""

import queue
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.rewards.budget import BatchBudget
from gtpo_megatron.rewards.worker_process import OVER_BUDGET, Limits, Verdict, WorkerProcess

DEFAULT_MEMORY_LIMIT_MIB = 4096


class RewardPool:
    """Runs a reward function in child processes.

    Children are fresh interpreters that import the function by name, so the pool works in scripts, in tests and inside
    Ray actors. They end with their parent, even when it is killed, and whatever they started ends with them, in
    sessions of their own too. Each is served by one thread here, so that a row waits for none but those before it.

    Args:
        function: ``module:function``.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit of one row; past it the worker is replaced and the row has no verdict.
        memory_limit_mib: what one row may take, shared mappings and processes that it starts included; past it the row
            has no verdict. 0: no limit.

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
        limits = Limits(function=function, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib)
        self._workers = [WorkerProcess(limits) for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        # Also when the pool is dropped without close(), and at exit.
        self._end = weakref.finalize(self, _end_all, self._workers, self._threads)
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the workers' supervisors as they are now; a worker, and what it started, are below its supervisor."""
        return [worker.supervisor_id for worker in self._workers]

    def submit(self, response: str, answer: str) -> "Future[Verdict]":
        """Queues a row; rows are taken in the order of submission.

        Raises:
            WorkerError: the pool is closed. The future raises it too, where a replacement worker does not start.
        """
        return self._submit(response, answer, None)

    def _submit(self, response: str, answer: str, budget: BatchBudget | None) -> "Future[Verdict]":
        if not self._end.alive:
            raise WorkerError("the reward pool is closed; make a new one")
        return self._threads.submit(_grade_by_any, self._idle, response, answer, budget)

    def grade(
        self, responses: Sequence[str], answers: Sequence[str], *, budget_s: float | None = None
    ) -> list[Verdict]:
        """Grades all rows; the order of the result is the order of the rows.

        Args:
            responses: to judge.
            answers: the references.
            budget_s: time for all of them together, see ``BatchBudget``; rows past it get no verdict. None: no bound.

        Raises:
            WorkerError: the pool is closed, or a replacement worker does not start.
        """
        budget = None
        if budget_s is not None:
            budget = BatchBudget(budget_s, num_rows=len(responses), num_workers=len(self._workers))
        rows = [self._submit(response, answer, budget) for response, answer in zip(responses, answers, strict=True)]
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

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _grade_by_any(
    idle: "queue.SimpleQueue[WorkerProcess]", response: str, answer: str, budget: BatchBudget | None
) -> Verdict:
    """By the next idle worker; there are as many threads as workers, so one is idle."""
    if budget is not None and time.monotonic() >= budget.deadline:
        return OVER_BUDGET
    worker = idle.get()
    try:
        return worker.grade(response, answer, budget=budget)
    finally:
        idle.put(worker)


def _end_all(workers: Sequence[WorkerProcess], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.end()
