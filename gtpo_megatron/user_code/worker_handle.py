"""The pool's side of one worker: its process, and the thread that serves it and ends it at a limit."""

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from gtpo_megatron.errors import ConfigError, DataError, GTPOError, WorkerError
from gtpo_megatron.supervision.process_tree import memory_bytes, process_stat
from gtpo_megatron.supervision.supervised_process import EXIT_PATIENCE_S, START_LIMIT_S, SupervisedProcess
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.user_code.frames import Frame, FrameKind, FrameReader, packed

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
"""Interval of memory readings while a worker has a call; a shorter call may not be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What the workers of a pool run, and their limits.

    Attributes:
        service: module of the service, see ``user_code.worker``.
        arguments: arguments of its ``load``, as JSON has them.
        name: words for the user's code in messages, such as ``environment 'FILE.py:Name'``.
        kind: kind of that code, such as ``environment``; names its output and the worker's thread.
        timeout_s: longest call.
        patience_s: time beyond it in which a worker may end a late call itself, before the worker is ended.
        start_limit_s: time in which a worker must have imported the user's code.
        memory_limit_mib: memory beyond that after the import, with shared mappings and child processes; 0: no limit.
    """

    service: str
    arguments: Mapping[str, Any]
    name: str
    kind: str
    timeout_s: float
    patience_s: float
    start_limit_s: float = START_LIMIT_S
    memory_limit_mib: int


class Cause(Enum):
    """Why a worker has ended."""

    NO_START = auto()
    DIED = auto()
    LATE = auto()
    OUT_OF_TIME = auto()
    """A call had time left, but not the batch that it belongs to."""
    MEMORY = auto()
    OTHER = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """The end of a worker.

    Attributes:
        cause: kind of the end.
        reason: clause for messages, without its subject; "" for a worker that has been retired.
        status: exit status of a worker that died.
        limit_s: seconds that a late call had.
        was_stopped: whether a signal had stopped a worker that was late.
        error: reason why no other worker would start; None: another one may.
    """

    cause: Cause
    reason: str = ""
    status: int = 0
    limit_s: float = 0.0
    was_stopped: bool = False
    error: GTPOError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What has come of a call.

    Attributes:
        session: number of the call's session.
        body: the worker's answer, as JSON has it; empty for a call that has failed.
        is_last: whether the session has ended.
        failure: reason in a line; "" unless the session has failed.
        is_lost: whether it has failed through no fault of its own, as far as can be told: it shared a worker.
        seconds: duration of a call that a worker's end has ended.
        exit: end of the worker by which the session has failed; None for all others.
    """

    session: int
    body: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    failure: str = ""
    is_lost: bool = False
    seconds: float = 0.0
    exit: WorkerExit | None = None


@dataclass(kw_only=True, slots=True)
class Session:
    """A series of calls that stay in one worker, as the pool's side of that worker has it.

    Attributes:
        first: body of its first call, to begin it elsewhere; empty once it has begun.
        deadline: function that gives the time by which a call that begins now must have ended; None: there is none.
        was_moved: whether another worker ended before it began.
        is_open: whether it has had an answer.
        is_called: whether a call waits for its answer.
        is_over: whether nobody waits for it; its worker has not closed it yet.
        began_at: start of the call under way.
        limit_s: seconds that this call may take.
        patience_s: seconds after these in which the worker may end it itself.
        ends_by: result of ``deadline`` for this call.
    """

    first: bytes
    deadline: Callable[[], float] | None = None
    was_moved: bool = False
    is_open: bool = False
    is_called: bool = True
    is_over: bool = False
    began_at: float | None = None
    limit_s: float = math.inf
    patience_s: float = 0.0
    ends_by: float = math.inf

    @property
    def late_at(self) -> float:
        """Time at which the call under way is late; infinite without one."""
        return math.inf if self.began_at is None else self.began_at + self.limit_s + self.patience_s


class WorkerHandle:
    """One worker. Its methods are called with the pool's lock held; its thread calls the three functions without it.

    Args:
        settings: settings of the pool.
        lock: lock of the pool.
        on_answer: takes the answer to a call; None: the worker is ready.
        on_retire: takes this and a reason, when the worker takes no more sessions.
        on_exit: takes this and the end of the worker, whose processes have ended.

    Attributes:
        sessions: sessions of the worker, by number.
        process: the worker, under its supervisor.
        thread: thread that serves the worker.
        has_started: set when the worker has imported the user's code, or never will.
        facts: facts of that code, from the service.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        lock: threading.RLock,
        *,
        on_answer: Callable[[Answer | None], None],
        on_retire: "Callable[[WorkerHandle, str], None]",
        on_exit: "Callable[[WorkerHandle, WorkerExit], None]",
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.has_started = threading.Event()
        self.facts: Mapping[str, Any] = {}
        self._settings = settings
        self._lock = lock
        self._on_answer, self._on_retire, self._on_exit = on_answer, on_retire, on_exit
        self._wake = -1
        self._outbox = bytearray()
        self._reader = FrameReader()
        self._end: WorkerExit | None = None
        self._prints_anew = False
        self._retires = False
        self._process_id = 0
        self._memory_limit = 0
        self._heard_at = self._watched_at = time.monotonic()
        with contextlib.ExitStack() as undo:
            self._connection, theirs = socket.socketpair()
            undo.callback(self._connection.close)
            self._connection.setblocking(False)
            with theirs:
                self.process = SupervisedProcess(
                    "gtpo_megatron.user_code.worker",
                    {
                        "service": settings.service,
                        "arguments": settings.arguments,
                        "memory_limit_mib": settings.memory_limit_mib,
                    },
                    descriptor=theirs.fileno(),
                    what=f"the {settings.kind}",
                )
            undo.callback(self.process.end)
            self._wake = os.eventfd(0)
            undo.callback(os.close, self._wake)
            self.thread = threading.Thread(target=self._run, name=settings.kind, daemon=True)
            self.thread.start()
            undo.pop_all()

    @property
    def is_ready(self) -> bool:
        """Whether it has imported the user's code."""
        return bool(self._process_id)

    @property
    def num_open(self) -> int:
        """Number of sessions that somebody waits for."""
        return sum(not one.is_over for one in self.sessions.values())

    def open(self, number: int, session: Session) -> None:
        """Begins a session."""
        self.sessions[number] = session
        self._prints_anew = True
        self._put(packed(FrameKind.OPEN, number, session.first))

    def call(self, number: int, body: bytes) -> None:
        """Makes the next call of a session."""
        self.sessions[number].is_called = True
        self._put(packed(FrameKind.CALL, number, body))

    def close(self, number: int) -> None:
        """Lets the worker close a session; nobody waits for it."""
        if not self.sessions[number].is_over:
            self.sessions[number].is_over = True
            self._put(packed(FrameKind.END, number))

    def end(self, reason: str = "") -> None:
        """Lets the thread end the worker."""
        if self._end is None:
            self._end = WorkerExit(cause=Cause.OTHER, reason=reason)
        self._rouse()

    def _put(self, frame: bytes) -> None:
        self._outbox += frame
        self._rouse()

    def _rouse(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Serves the worker until it ends, and then ends what it has started."""
        try:
            how = self._serve()
        except ConfigError as error:
            how = WorkerExit(cause=Cause.NO_START, error=error)
        except Exception:
            logger.exception("the thread beside a worker of %s has failed", self._settings.name)
            how = WorkerExit(cause=Cause.OTHER, reason="was ended, since the thread beside it has failed (see the log)")
        self.process.end()
        if self._process_id == 0 and how.error is None:
            failure = f"{self._settings.name}: a worker did not start: it {how.reason}; see its output on stderr"
            how = WorkerExit(cause=Cause.NO_START, error=WorkerError(failure))
        with self._lock:
            self._connection.close()
            os.close(self._wake)
            self._wake = -1
        self._on_exit(self, how)
        self.has_started.set()

    def _serve(self) -> WorkerExit:
        """Serves the worker; returns why it is to end.

        Raises:
            ConfigError: it cannot import the user's code.
        """
        output = self.process.output
        poll = select.poll()
        for descriptor in (self._connection.fileno(), output.descriptor, self._wake):
            poll.register(descriptor, select.POLLIN)
        was_busy = False
        while True:
            with self._lock:
                if (how := self._ordered_end()) is not None:
                    return how
                if self._prints_anew:  # what is there was printed before the session that is sent now
                    self._prints_anew = False
                    output.pass_on(is_new=True)
                has_more = self._send()
                wait_s = self._wait_s()
            is_busy = wait_s is not None
            if is_busy and not was_busy:
                self._heard_at = time.monotonic()
            was_busy = is_busy
            poll.modify(self._connection.fileno(), select.POLLIN | (select.POLLOUT if has_more else 0))
            ready = {descriptor for descriptor, _ in poll.poll(None if wait_s is None else 1000 * wait_s + 1)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if output.descriptor in ready and not output.pass_on():
                poll.unregister(output.descriptor)
            how = self._receive() if self._connection.fileno() in ready else None
            if how is None and is_busy:
                with self._lock:
                    how = self._overdue()
                how = how or self._too_large()
            if how is not None:
                return how

    def _ordered_end(self) -> WorkerExit | None:
        if self._end is None and self._retires and not self.sessions:
            return WorkerExit(cause=Cause.OTHER)
        return self._end

    def _wait_s(self) -> float | None:
        """Seconds until it must be looked at again; None for a worker that has no call."""
        sessions = self.sessions.values()
        if self._process_id and not any(one.is_called or one.is_over for one in sessions):
            return None
        ends = [min(one.late_at, one.ends_by) for one in sessions if one.began_at is not None]
        return max(0.0, min([WATCH_EVERY_S, *(end - time.monotonic() for end in ends)]))

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

    def _receive(self) -> WorkerExit | None:
        """Takes what has arrived; why the worker is to end, if it is."""
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            status = self.process.end(EXIT_PATIENCE_S)
            return WorkerExit(cause=Cause.DIED, reason=f"ended with status {status}", status=status)
        self._heard_at = time.monotonic()
        self.process.output.pass_on()  # output was written before the frame
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except DataError as error:
            return WorkerExit(cause=Cause.OTHER, reason=f"was ended ({error})")
        return None

    def _take(self, frame: Frame) -> None:
        """Takes a frame.

        Raises:
            DataError: a worker does not send such a frame now.
            ConfigError: the worker cannot import the user's code.
        """
        if frame.kind is FrameKind.READY:
            body = self._fields(frame)
            if error := body.get("error", str, ""):
                raise ConfigError(error)
            self.facts = body.raw["facts"]
            self._process_id = body.get("process_id", int)
            if self._settings.memory_limit_mib:
                self._memory_limit = memory_bytes(self._process_id) + (self._settings.memory_limit_mib << 20)
            self.has_started.set()
            self._on_answer(None)
        elif frame.kind is FrameKind.RETIRES:
            if not self._retires:
                self._retires = True
                self._on_retire(self, self._fields(frame).get("reason", str))
        elif (answer := self._take_of_session(frame)) is not None:
            self._on_answer(answer)

    def _take_of_session(self, frame: Frame) -> Answer | None:
        with self._lock:
            session = self.sessions.get(frame.session)
            if session is None:
                raise DataError(f"it sent {frame.kind.name} for a session that it has not got")
            if frame.kind is FrameKind.CLOSED:
                if not session.is_over:
                    raise DataError("it closed a session that had not ended")
                del self.sessions[frame.session]
                return None
            if session.is_over:
                return None
            is_result = frame.kind in (FrameKind.ANSWER, FrameKind.DONE)
            is_right = (is_result or frame.kind in (FrameKind.BEGUN, FrameKind.FAILED)) and session.is_called
            if not is_right or (is_result and session.began_at is None):
                raise DataError(f"it sent {frame.kind.name} for a session that has no such call")
            if frame.kind is FrameKind.BEGUN:
                self._begin(session, frame)
                return None
            answer = self._answer(frame)
            session.is_open, session.is_called, session.began_at = True, False, None
            if answer.is_last and frame.kind is FrameKind.ANSWER:  # it cannot be read
                self.close(frame.session)
            session.is_over |= answer.is_last
        return answer

    def _begin(self, session: Session, frame: Frame) -> None:
        if session.began_at is None:
            session.began_at, session.first = time.monotonic(), b""
            session.limit_s, session.patience_s = self._settings.timeout_s, self._settings.patience_s
            session.ends_by = math.inf if session.deadline is None else session.deadline()
        if frame.body:
            body = self._fields(frame)
            session.limit_s, session.patience_s = body.get("limit_s", float), body.get("patience_s", float)

    def _answer(self, frame: Frame) -> Answer:
        """What a frame says; a failure if it cannot be read."""
        try:
            body = self._fields(frame)
            failure = body.get("reason", str) if frame.kind is FrameKind.FAILED else ""
        except DataError as error:
            return Answer(session=frame.session, is_last=True, failure=str(error))
        is_last = frame.kind is not FrameKind.ANSWER
        return Answer(session=frame.session, body=body.raw, is_last=is_last, failure=failure)

    def _fields(self, frame: Frame) -> Fields:
        return Fields(parse_json(frame.body, self._settings.name, half_pairs=True), self._settings.name)

    def _overdue(self) -> WorkerExit | None:
        """Why the worker is to end, if it is late."""
        now, settings = time.monotonic(), self._settings
        silent_s = now - self._heard_at
        if not self._process_id:
            reason = f"took longer than {settings.start_limit_s:g} s"
            return WorkerExit(cause=Cause.NO_START, reason=reason) if silent_s > settings.start_limit_s else None
        calls = [one for one in self.sessions.values() if one.began_at is not None]
        for one in calls:
            if now > one.ends_by < one.late_at:
                return WorkerExit(cause=Cause.OUT_OF_TIME, reason="was ended, since a batch had no time left")
            if now > one.late_at:
                return self._late(one.limit_s)
        if not calls and silent_s > settings.timeout_s + settings.patience_s:
            return self._late(settings.timeout_s)
        return None

    def _late(self, limit_s: float) -> WorkerExit:
        stat = process_stat(self._process_id)
        return WorkerExit(
            cause=Cause.LATE,
            reason=f"did not answer within {limit_s:g} s",
            limit_s=limit_s,
            was_stopped=stat is not None and stat.state == "T",
        )

    def _too_large(self) -> WorkerExit | None:
        """Why the worker is to end, if it and its descendants need too much memory."""
        now = time.monotonic()
        if not self._memory_limit or now - self._watched_at < WATCH_EVERY_S:
            return None
        self._watched_at = now
        if memory_bytes(self._process_id) <= self._memory_limit:
            return None
        return WorkerExit(
            cause=Cause.MEMORY, reason=f"needed more than {self._settings.memory_limit_mib} MiB of memory"
        )
