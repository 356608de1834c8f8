"""Workers that serve the sessions of a pool, each replaced when it ends or breaks a limit.

A session stays in its worker, maybe beside others. If the worker ends, does not answer or is too large, its sessions
fail: those that were being called are at fault as far as can be told, and all others are :attr:`Answer.is_lost`. A
session that had not begun goes to another worker, once.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gtpo_megatron.errors import ConfigError, GTPOError, WorkerError
from gtpo_megatron.user_code.worker_handle import (
    Answer,
    Cause,
    Session,
    WorkerExit,
    WorkerHandle,
    WorkerSettings,
)

logger = logging.getLogger(__name__)


class WorkerPool:
    """The workers of a pool, and those that are to be replaced and still have sessions.

    Workers are new interpreters that import the user's code by name, so a pool works in scripts, tests and Ray actors.
    They and all their descendants end with this process, even if it is killed.

    Args:
        settings: settings of each worker.
        on_answer: takes the answers to calls, in the workers' threads; None: a worker is ready, or ``check`` raises.

    Attributes:
        lock: lock of the pool; a thread may take it again, as a finalizer does that runs in one that has it.
        error: reason why a worker did not start; None: none failed to.
    """

    def __init__(self, settings: WorkerSettings, on_answer: Callable[[Answer | None], None]) -> None:
        self.lock = threading.RLock()
        self._settings = settings
        self._on_answer = on_answer
        self._has_ended = False
        self._workers: list[WorkerHandle] = []
        self._retiring: list[WorkerHandle] = []
        self.error: GTPOError | None = None

    def start(self, num_workers: int) -> Mapping[str, Any]:
        """Starts the workers, and waits until all have imported the user's code; returns its facts, see ``Service``.

        Raises:
            ConfigError: they cannot import it, or a number is out of range.
            WorkerError: one does not start.
        """
        settings = self._settings
        if num_workers < 1 or settings.timeout_s <= 0 or settings.memory_limit_mib < 0:
            raise ConfigError(
                f"num_workers={num_workers}, timeout_s={settings.timeout_s}, memory_limit_mib="
                f"{settings.memory_limit_mib}: need at least 1 worker, more than 0 s and at least 0 MiB"
            )
        with self.lock:
            for _ in range(num_workers):  # one by one: those before one that cannot be made are ended by ``end``
                self._workers.append(self._new_worker())
            workers = list(self._workers)
        for worker in workers:
            worker.has_started.wait()
            self.check()
        return workers[0].facts

    def check(self) -> None:
        """Raises what has kept a worker from starting, if one did not."""
        if self.error is not None:
            raise self.error

    @property
    def supervisor_ids(self) -> list[int]:
        """Process ids of the workers' supervisors."""
        with self.lock:
            return [worker.process.supervisor_id for worker in self._workers]

    @property
    def num_idle(self) -> int:
        """Number of workers that are ready and have no session that somebody waits for."""
        return sum(worker.is_ready and not worker.num_open for worker in self._workers)

    def open(self, number: int, body: bytes, *, deadline: Callable[[], float] | None = None) -> None:
        """Begins a session in the worker that has the fewest.

        Args:
            number: number of the session, which no other one gets.
            body: body of its first call.
            deadline: see ``Session``.
        """
        self._assign(number, Session(first=body, deadline=deadline))

    def call(self, number: int, body: bytes) -> None:
        """Makes the next call of a session, unless it has just failed."""
        with self.lock:
            for worker in self._with_session(number):
                worker.call(number, body)

    def close(self, number: int) -> None:
        """Ends a session, if it is in a worker."""
        with self.lock:
            for worker in self._with_session(number):
                worker.close(number)

    def end(self) -> None:
        """Ends all workers and what they have started."""
        with self.lock:
            self._has_ended = True
            workers = [*self._workers, *self._retiring]
            for worker in workers:
                worker.end()
        for worker in workers:
            worker.process.end()

    def join(self) -> None:
        """Waits until nothing runs beside the workers; after ``end``."""
        for worker in (*self._workers, *self._retiring):
            if worker.thread is not threading.current_thread():
                worker.thread.join()

    def _new_worker(self) -> WorkerHandle:
        """Starts a worker.

        Raises:
            WorkerError: the machine has no process, thread or descriptor left for it.
        """
        try:
            return WorkerHandle(
                self._settings, self.lock, on_answer=self._on_answer, on_retire=self._replace, on_exit=self._handle_exit
            )
        except (OSError, RuntimeError) as error:
            raise WorkerError(f"{self._settings.name}: a worker did not start: {error}") from error

    def _put_another(self, worker: WorkerHandle) -> None:
        """Puts a new worker in the place of one; ``error`` says why if there is none."""
        try:
            self._workers[self._workers.index(worker)] = self._new_worker()
        except WorkerError as error:
            self.error = error

    def _assign(self, number: int, session: Session) -> None:
        with self.lock:
            min(self._workers, key=lambda worker: (worker.num_open, not worker.is_ready)).open(number, session)

    def _with_session(self, number: int) -> list[WorkerHandle]:
        return [worker for worker in (*self._workers, *self._retiring) if number in worker.sessions]

    def _replace(self, worker: WorkerHandle, reason: str) -> None:
        """Starts another worker in the place of one that takes no more sessions."""
        with self.lock:
            if self._has_ended or worker not in self._workers:
                return
            logger.warning("a worker of %s is to be replaced: %s", self._settings.name, reason)
            self._put_another(worker)
            if self.error is None:
                self._retiring.append(worker)
                if len(self._retiring) > len(self._workers):  # or memory would have no limit
                    self._retiring[0].end("was to be replaced, and made room for the next one")
                return
        self._on_answer(None)

    def _handle_exit(self, worker: WorkerHandle, how: WorkerExit) -> None:
        """Fails the sessions of a worker that has ended, moves those that it had not begun, and replaces it."""
        answers: list[Answer | None] = []
        with self.lock:
            if self._has_ended:
                return
            if how.error is not None:
                self.error = how.error
            elif worker in self._workers:
                logger.warning("a worker of %s was replaced: it %s", self._settings.name, how.reason)
                self._put_another(worker)
            else:
                self._retiring.remove(worker)
            answers += [None] if self.error is not None else self._failures(worker, how)
        for answer in answers:
            self._on_answer(answer)

    def _failures(self, worker: WorkerHandle, how: WorkerExit) -> list[Answer]:
        """The failed sessions of a worker that has ended; those that it had not begun are moved."""
        left = {number: one for number, one in worker.sessions.items() if not one.is_over}
        worker.sessions.clear()
        seconds = {number: time.monotonic() - one.began_at for number, one in left.items() if one.began_at is not None}
        called = set(seconds)
        if how.cause is Cause.LATE:  # a loop that is blocked: the calls that it should have ended by now
            called = {number for number in called if seconds[number] > left[number].limit_s} or called
        failures = []
        for number, one in left.items():
            if not one.is_open and one.began_at is None and not one.was_moved:
                one.was_moved = True
                self._assign(number, one)
                continue
            if number in called:
                when = "during this call" + (f", or one of {len(called) - 1} others" if len(called) > 1 else "")
            else:
                when = "during another call" if called else "while it was not called"
            failures.append(
                Answer(
                    session=number,
                    is_last=True,
                    failure=f"{self._settings.name}: its worker {how.reason} {when}",
                    is_lost=number not in called,
                    seconds=seconds.get(number, 0.0),
                    exit=how,
                )
            )
        return failures
