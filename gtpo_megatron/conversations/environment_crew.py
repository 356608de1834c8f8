"""The workers of an environment pool: one thread beside each, which replaces it when it ends or breaks a limit."""

import logging
import os
import queue
import select
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace

from gtpo_megatron.conversations.environment_worker import CANCEL_PATIENCE_S
from gtpo_megatron.conversations.frames import Frame, FrameReader, Kind, packed
from gtpo_megatron.conversations.messages import Opening, Reply
from gtpo_megatron.conversations.openai_form import opening_of_json, reply_of_json
from gtpo_megatron.conversations.verifiers import LOAD_LIMIT_S, is_of_verifiers
from gtpo_megatron.errors import ConfigError, DataError, WorkerError
from gtpo_megatron.supervision.process_tree import memory_bytes
from gtpo_megatron.supervision.supervised_process import EXIT_PATIENCE_S, START_LIMIT_S, SupervisedProcess
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
"""Interval of memory readings, and of looks at the clock, while a worker is asked something."""

SILENCE_PATIENCE_S = 2.0
"""Time beyond the limit of a call in which a worker that enforces it must have been heard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The environment and limits of a worker, as of the pool; ``memory_limit_mib`` is beyond that after import."""

    name: str
    timeout_s: float
    memory_limit_mib: int

    @property
    def where(self) -> str:
        """The environment in messages."""
        return f"environment {self.name!r}"

    @property
    def start_s(self) -> float:
        """Time in which a worker must be ready; a taskset of verifiers is loaded in it."""
        return START_LIMIT_S + (LOAD_LIMIT_S if is_of_verifiers(self.name) else 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What has become of an opening or of a message.

    Attributes:
        episode: its number.
        opening: what the episode begins with; None if this is none.
        reply: the environment's answer; None if this is none.
        failure: why the episode has ended, in a line; "" if it has not failed.
        is_lost: it has failed through no fault of its own, as far as can be told: it shared a worker.
        seconds: that the environment took.
        is_graded_last: of an opening: the reward is asked for after the last turn only, so that an episode which a
            limit ends has none.
        num_refused: requests of an agent that were refused in the episode so far; None: it has none.
        refusal: why the first of them was.
    """

    episode: int
    opening: Opening | None = None
    reply: Reply | None = None
    failure: str = ""
    is_lost: bool = False
    seconds: float = 0.0
    is_graded_last: bool = False
    num_refused: int | None = None
    refusal: str = ""

    def of(self, episode: int) -> "Event":
        """It with another number."""
        return replace(self, episode=episode)


@dataclass(slots=True)
class _Episode:
    """An episode as the pool's side of its worker has it."""

    row: bytes  # to begin it elsewhere
    is_open: bool = False  # its opening has come
    is_asked: bool = True
    began_at: float | None = None  # of the call under way
    is_over: bool = False  # nobody waits for it; its worker has not closed it yet


class Crew:
    """The workers of a pool, and those that are to be replaced and still have episodes.

    Args:
        limits: of each.

    Attributes:
        events: what has happened, by the numbers that ``open`` was given; None: ``check`` raises.
    """

    def __init__(self, limits: Limits) -> None:
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.lock = threading.RLock()  # a finalizer may run in a thread that has it
        self.limits = limits
        self.has_ended = False
        self._workers: list[Worker] = []
        self._retired: list[Worker] = []
        self._error: ConfigError | WorkerError | None = None

    def start(self, num_workers: int) -> None:
        """Starts the workers, and waits until all have imported the environment.

        Raises:
            ConfigError: they cannot.
            WorkerError: one does not start.
        """
        for _ in range(num_workers):
            self._workers.append(Worker(self))
        for worker in list(self._workers):
            worker.has_started.wait()
            self.check()

    def check(self) -> None:
        """Raises what has kept a worker from starting, if one did not."""
        if self._error is not None:
            raise self._error

    @property
    def supervisor_ids(self) -> list[int]:
        """Process ids of the workers' supervisors."""
        with self.lock:
            return [worker.process.supervisor_id for worker in self._workers]

    def open(self, number: int, row: bytes) -> None:
        """Begins an episode in the worker that has the fewest.

        Raises:
            DataError: the row is too long.
        """
        frame = packed(Kind.OPEN, number, row)
        with self.lock:
            worker = min(self._workers, key=lambda one: len(one.episodes))
            worker.episodes[number] = _Episode(row)
            worker.put(frame)

    def step(self, number: int, message: bytes) -> None:
        """Hands a message to an episode, unless that has just failed.

        Raises:
            DataError: the message is too long.
        """
        frame = packed(Kind.STEP, number, message)
        with self.lock:
            for worker in self._with_episode(number):
                worker.episodes[number].is_asked = True
                worker.put(frame)

    def close(self, number: int) -> None:
        """Ends an episode, if it is in a worker."""
        with self.lock:
            for worker in self._with_episode(number):
                worker.end_episode(number)

    def _with_episode(self, number: int) -> "list[Worker]":
        return [worker for worker in (*self._workers, *self._retired) if number in worker.episodes]

    def retire(self, worker: "Worker", reason: str) -> None:
        """Starts another worker in the place of one that takes no more episodes."""
        fresh = Worker(self)
        with self.lock:
            if self.has_ended or worker not in self._workers:
                fresh.give_up("")
                return
            logger.warning("a worker of %s is to be replaced: %s", self.limits.where, reason)
            self._workers[self._workers.index(worker)] = fresh
            self._retired.append(worker)
            if len(self._retired) > len(self._workers):  # or memory would have no limit
                self._retired[0].give_up("its worker was to be replaced, and made room for the next one")

    def gone(self, worker: "Worker", reason: str, *, error: ConfigError | WorkerError | None = None) -> None:
        """Fails the episodes of a worker that has ended, moves those that it had not begun, and replaces it.

        Args:
            worker: it, whose processes have ended.
            reason: why it has, as a clause; "" if it was to end.
            error: why no other worker would start.
        """
        fresh = Worker(self) if worker in self._workers and error is None and not self.has_ended else None
        with self.lock:
            if self.has_ended:
                if fresh is not None:
                    fresh.give_up("")
                return
            if error is not None:
                self._error = error
                self.events.put(None)
                return
            if fresh is not None:
                self._workers[self._workers.index(worker)] = fresh
                logger.warning("a worker of %s was replaced: %s", self.limits.where, reason)
            else:
                self._retired.remove(worker)
            self._fail_all(worker, reason)

    def _fail_all(self, worker: "Worker", reason: str) -> None:
        left = {number: one for number, one in worker.episodes.items() if not one.is_over}
        worker.episodes.clear()
        called = [number for number, one in left.items() if one.began_at is not None]
        if worker.is_silent:  # a loop that is blocked: the calls that it should have ended by now
            called = [number for number in called if self._is_late(left[number])] or called
        for number, one in left.items():
            if not one.is_open and one.began_at is None:
                self.open(number, one.row)
                continue
            is_lost = number not in called
            if is_lost:
                when = "during a call of another episode" if called else "while it was not called"
            else:
                when = "during this call" + (f", or one of {len(called) - 1} others" if called[1:] else "")
            began = one.began_at
            self.events.put(
                Event(
                    episode=number,
                    failure=f"{self.limits.where}: {reason} {when}",
                    is_lost=is_lost,
                    seconds=0.0 if began is None else time.monotonic() - began,
                )
            )

    def _is_late(self, episode: _Episode) -> bool:
        return episode.began_at is not None and time.monotonic() - episode.began_at > self.limits.timeout_s

    def end(self) -> None:
        """Ends all workers and what they have started."""
        with self.lock:
            self.has_ended = True
            workers = [*self._workers, *self._retired]
        for worker in workers:
            worker.give_up("")
        for worker in workers:
            worker.process.end()

    def join(self) -> None:
        """Waits until nothing runs beside the workers; after ``end``."""
        for worker in (*self._workers, *self._retired):
            if worker.thread is not threading.current_thread():
                worker.thread.join()


class Worker:
    """One worker process and the thread that serves it. All but the thread holds the crew's lock when it calls it.

    Attributes:
        episodes: those that it has, by number.
        process: it, under its supervisor.
        thread: that serves it.
        has_started: it has imported the environment, or never will.
        is_silent: it has ended because it did not answer.
    """

    def __init__(self, crew: Crew) -> None:
        self.episodes: dict[int, _Episode] = {}
        self.has_started = threading.Event()
        self.is_silent = False
        self._crew = crew
        self._limits = crew.limits
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        with theirs:
            self.process = SupervisedProcess(
                "gtpo_megatron.conversations.environment_worker",
                asdict(crew.limits),
                descriptor=theirs.fileno(),
                what="the environment",
            )
        self._wake = os.eventfd(0)
        self._outbox = bytearray()
        self._reader = FrameReader()
        self._end_reason: str | None = None
        self._retires = False
        self._process_id = 0
        self._memory_limit = 0
        self._heard_at = self._watched_at = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self.thread.start()

    def put(self, frame: bytes) -> None:
        """Queues a frame."""
        self._outbox += frame
        self._rouse()

    def end_episode(self, number: int) -> None:
        """Lets the worker close an episode; nobody waits for it."""
        if not self.episodes[number].is_over:
            self.episodes[number].is_over = True
            self.put(packed(Kind.END, number))

    def give_up(self, reason: str) -> None:
        """Lets the thread end the worker, for a reason as of ``Crew.gone``."""
        if self._end_reason is None:
            self._end_reason = reason
        self._rouse()

    def _rouse(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Serves the worker until it ends, and then ends what it has started."""
        reason = ""
        error: ConfigError | WorkerError | None = None
        try:
            reason = self._serve()
        except ConfigError as problem:
            error = problem
        except Exception:
            logger.exception("the thread beside a worker of %s has failed", self._limits.where)
            reason = "the thread beside its worker has failed (see the log)"
        self.process.end()
        if self._process_id == 0 and error is None:
            error = WorkerError(f"{self._limits.where}: {reason} before it was ready; see its output on stderr")
        with self._crew.lock:
            self._connection.close()
            os.close(self._wake)
            self._wake = -1
        self._crew.gone(self, reason, error=error)
        self.has_started.set()

    def _serve(self) -> str:
        """Serves the worker; returns why it is to end, "" if it was told to.

        Raises:
            ConfigError: it cannot import the environment.
        """
        output = self.process.output
        poll = select.poll()
        for descriptor in (self._connection.fileno(), output.descriptor, self._wake):
            poll.register(descriptor, select.POLLIN)
        was_busy = False
        while True:
            with self._crew.lock:
                if self._end_reason is not None:
                    return self._end_reason
                if self._retires and not self.episodes:
                    return ""
                is_busy = not self._process_id or any(one.is_asked or one.is_over for one in self.episodes.values())
                has_more = self._send()
            if is_busy and not was_busy:
                self._heard_at = time.monotonic()
            was_busy = is_busy
            poll.modify(self._connection.fileno(), select.POLLIN | (select.POLLOUT if has_more else 0))
            ready = {descriptor for descriptor, _ in poll.poll(WATCH_EVERY_S * 1000 if is_busy else None)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if output.descriptor in ready and not output.pass_on():
                poll.unregister(output.descriptor)
            reason = self._receive() if self._connection.fileno() in ready else ""
            if not reason and is_busy:
                reason = self._overdue()
            if reason:
                return reason

    def _send(self) -> bool:
        """Sends what the pipe takes now; whether there is more."""
        while self._outbox:
            try:
                del self._outbox[: self._connection.send(self._outbox)]
            except BlockingIOError:
                return True
            except OSError:  # the reader sees the same, and says so
                self._outbox.clear()
        return False

    def _receive(self) -> str:
        """Takes what has arrived; why the worker is to end, or ""."""
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return ""
        except OSError:
            data = b""
        if not data:
            return f"its worker ended with status {self.process.end(EXIT_PATIENCE_S)}"
        self._heard_at = time.monotonic()
        self.process.output.pass_on()  # output was written before the frame
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except DataError as error:
            return f"its worker was ended ({error})"
        return ""

    def _take(self, frame: Frame) -> None:
        """Takes a frame.

        Raises:
            DataError: a worker does not send such a frame now.
            ConfigError: the worker cannot import the environment.
        """
        if frame.kind is Kind.READY:
            body = self._fields(frame)
            if error := body.get("error", str, ""):
                raise ConfigError(error)
            self._process_id = body.get("process_id", int)
            if self._limits.memory_limit_mib:
                self._memory_limit = memory_bytes(self._process_id) + (self._limits.memory_limit_mib << 20)
            self.has_started.set()
        elif frame.kind is Kind.RETIRES:
            if not self._retires:
                self._retires = True
                self._crew.retire(self, self._fields(frame).get("reason", str))
        else:
            self._take_of_episode(frame)

    def _take_of_episode(self, frame: Frame) -> None:
        with self._crew.lock:
            episode = self.episodes.get(frame.episode)
            if episode is None:
                raise DataError(f"it sent {frame.kind.name} for an episode that it has not got")
            if frame.kind is Kind.CLOSED:
                if not episode.is_over:
                    raise DataError("it closed an episode that had not ended")
                del self.episodes[frame.episode]
                return
            if episode.is_over:
                return
            expected = Kind.REPLY if episode.is_open else Kind.OPENING
            is_right = frame.kind in (Kind.BEGUN, Kind.FAILED, expected) and episode.is_asked
            if not is_right or (frame.kind is expected and episode.began_at is None):
                raise DataError(f"it sent {frame.kind.name} for an episode that had not asked for it")
            if frame.kind is Kind.BEGUN:
                episode.began_at = time.monotonic()
                self.process.output.pass_on(is_new=not episode.is_open)
                return
        event = self._event(frame)
        with self._crew.lock:
            episode.is_open, episode.is_asked, episode.began_at, episode.row = True, False, None, b""
            if event.failure and frame.kind is not Kind.FAILED and not episode.is_over:
                self.end_episode(frame.episode)
            episode.is_over |= bool(event.failure) or (event.reply is not None and event.reply.done)
        self._crew.events.put(event)

    def _event(self, frame: Frame) -> Event:
        """What a frame says, checked; a failure if it says nothing right."""
        where = self._limits.where
        try:
            body = self._fields(frame)
            told = Event(
                episode=frame.episode,
                seconds=body.get("seconds", float),
                is_graded_last=body.get("is_graded_last", bool, False),
                num_refused=body.get("num_refused", int) if body.has("num_refused") else None,
                refusal=body.get("refusal", str, ""),
            )
            if frame.kind is Kind.FAILED:
                return replace(told, failure=body.get("reason", str))
            if frame.kind is Kind.OPENING:
                return replace(told, opening=opening_of_json(body.raw, f"{where}: reset"))
            return replace(told, reply=reply_of_json(body.raw, f"{where}: step"))
        except DataError as error:
            return Event(episode=frame.episode, failure=str(error))

    def _fields(self, frame: Frame) -> Fields:
        where = self._limits.where
        return Fields(parse_json(frame.body, where, half_pairs=True), where)

    def _overdue(self) -> str:
        """Why the worker is to end, or "": it is late, or too large."""
        now = time.monotonic()
        silent_s = now - self._heard_at
        if not self._process_id:
            limit = self._limits.start_s
            return f"its worker took longer than {limit:g} s" if silent_s > limit else ""
        if silent_s > self._limits.timeout_s + CANCEL_PATIENCE_S + SILENCE_PATIENCE_S:
            self.is_silent = True
            return f"its worker did not answer within {self._limits.timeout_s:g} s"
        if self._memory_limit and now - self._watched_at >= WATCH_EVERY_S:
            self._watched_at = now
            if memory_bytes(self._process_id) > self._memory_limit:
                return f"its worker needed more than {self._limits.memory_limit_mib} MiB of memory"
        return ""
