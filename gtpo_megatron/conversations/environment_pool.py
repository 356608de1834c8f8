"""Environments in worker processes, for an engine's loop that never waits for them.

What is wrong with an episode fails it alone: an error, a wrong answer, a call that is late, too little memory. What
becomes of the episodes of a worker that ends, :mod:`gtpo_megatron.user_code.worker_pool` says.
"""

import contextlib
import json
import queue
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.conversations.environment_worker import CANCEL_PATIENCE_S
from gtpo_megatron.conversations.messages import (
    MAX_MESSAGE_BYTES,
    Message,
    Opening,
    Reply,
    message_json,
    opening_of_json,
    plain,
    reply_of_json,
)
from gtpo_megatron.conversations.verifiers import LOAD_LIMIT_S, is_of_verifiers
from gtpo_megatron.errors import DataError, StageOrderError, WorkerError
from gtpo_megatron.supervision.supervised_process import START_LIMIT_S
from gtpo_megatron.user_code.worker_handle import Answer, WorkerSettings
from gtpo_megatron.user_code.worker_pool import WorkerPool

SILENCE_PATIENCE_S = 2.0
"""Time beyond the limit of a call in which a worker that enforces it must have been heard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeAnswer(Answer):
    """What has come of an opening or of a message.

    ``session`` is the number of the episode, ``seconds`` the time that the environment took.

    Attributes:
        opening: beginning of the episode; None if this is none.
        reply: the environment's reply to a turn; None if this is none.
        is_graded_last: whether, of an opening, the reward is asked for after the last turn only.
        is_graded_anywhere: whether, of an opening, it can be asked for after a limit has ended the episode, too.
        num_refused: requests of an agent that were refused in the episode so far; None: it has no agent.
        num_unenforced: requests of an agent that asked for what is not enforced so far; None: it has no agent.
        refusal: reason of the first refusal.
    """

    opening: Opening | None = None
    reply: Reply | None = None
    is_graded_last: bool = False
    is_graded_anywhere: bool = False
    num_refused: int | None = None
    num_unenforced: int | None = None
    refusal: str = ""

    @classmethod
    def of(cls, answer: Answer, episode: int) -> "EpisodeAnswer":
        """The answer to an episode that its caller knows by another number."""
        body = answer.body
        return cls(
            session=episode,
            opening=opening_of_json(body["opening"]) if "opening" in body else None,
            reply=reply_of_json(body["reply"]) if "reply" in body else None,
            is_last=answer.is_last,
            failure=answer.failure,
            is_lost=answer.is_lost,
            seconds=body.get("seconds", answer.seconds),
            is_graded_last=body.get("is_graded_last", False),
            is_graded_anywhere=body.get("is_graded_anywhere", False),
            num_refused=body.get("num_refused"),
            num_unenforced=body.get("num_unenforced"),
            refusal=body.get("refusal", ""),
        )


def worker_settings(name: str, *, timeout_s: float, memory_limit_mib: int, interface: str = "lo") -> WorkerSettings:
    """The settings of an environment's workers; a taskset of verifiers has time to be loaded."""
    return WorkerSettings(
        service="gtpo_megatron.conversations.environment_worker",
        arguments={"name": name, "timeout_s": timeout_s, "interface": interface},
        name=f"environment {name!r}",
        kind="environment",
        timeout_s=timeout_s,
        patience_s=CANCEL_PATIENCE_S + SILENCE_PATIENCE_S,
        start_limit_s=START_LIMIT_S + (LOAD_LIMIT_S if is_of_verifiers(name) else 0.0),
        memory_limit_mib=memory_limit_mib,
    )


class EnvironmentPool:
    """Runs the episodes of an environment in worker processes; the methods are for one thread.

    Args:
        name: ``module:Name`` or ``FILE.py:Name``, see :mod:`gtpo_megatron.conversations.environment`.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit of a call of an environment.
        memory_limit_mib: memory limit of a worker, for all its episodes, with shared mappings and child processes; 0:
            no limit.
        interface: network interface on whose address the endpoint of agents listens.

    Raises:
        ConfigError: the environment cannot be imported, a tool cannot be described, a number is out of range, or there
            is no such interface.
        WorkerError: a worker does not start.
    """

    def __init__(
        self, name: str, *, num_workers: int, timeout_s: float, memory_limit_mib: int, interface: str = "lo"
    ) -> None:
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        settings = worker_settings(name, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib, interface=interface)
        self._workers = WorkerPool(settings, self._answers.put)
        # Also if the pool is garbage-collected without close(), and at exit.
        self._end = weakref.finalize(self, self._workers.end)
        self._numbers: dict[int, int] = {}  # by episode, the number of its session, which none gets twice
        self._episodes: dict[int, int] = {}  # the other way round
        self._asked: set[int] = set()  # numbers of those that wait for an answer
        self._num_opened = 0
        try:
            self._workers.start(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers' current supervisors; workers are their children."""
        return self._workers.supervisor_ids

    def open(self, episode: int, row: Mapping[str, Any]) -> None:
        """Begins an episode; its answer has an opening or a failure.

        Args:
            episode: a number that no episode under way has.
            row: values that JSON has: ``prompt``, ``answer`` and the row's other columns.

        Raises:
            StageOrderError: an episode of this number is under way.
            WorkerError: the pool is closed, or a worker does not start.
        """
        if episode in self._numbers:
            raise StageOrderError(f"episode {episode} is under way; end it before another one of its number is opened")
        self._num_opened += 1
        self._numbers[episode] = self._num_opened
        self._episodes[self._num_opened] = episode
        self._asked.add(self._num_opened)
        with self._failing(self._num_opened, "the row"):
            self._workers.open(self._num_opened, _json(row))

    def step(self, episode: int, message: Message) -> None:
        """Hands a turn of the policy to an episode; its answer has a reply or a failure.

        Raises:
            StageOrderError: there is no such episode, or it has not answered yet.
            WorkerError: the pool is closed, or a worker does not start.
        """
        number = self._called(episode)
        with self._failing(number, "the policy's message"):
            self._workers.call(number, _json(message_json(message)))

    def grade(self, episode: int) -> None:
        """Asks for the reward of an episode that a limit has ended; its answer has a last reply or a failure.

        Raises:
            StageOrderError: there is no such episode, or it has not answered yet.
            WorkerError: the pool is closed, or a worker does not start.
        """
        number = self._called(episode)
        with self._failing(number, "the end"):
            self._workers.call(number, b"null")

    def end(self, episode: int) -> None:
        """Ends an episode that is neither done nor failed, if it is under way; no answer of it comes any more."""
        number = self._numbers.pop(episode, None)
        if number is not None:
            del self._episodes[number]
            self._asked.discard(number)
            self._workers.close(number)

    def poll(self, timeout_s: float) -> list[EpisodeAnswer]:
        """The answers since the last call; an episode that is done or has failed is under way no more.

        A worker that ends fails its episodes at once, so a failure may come of one that waits for the policy.

        Args:
            timeout_s: time to wait for the first; 0: none.

        Raises:
            WorkerError: the pool is closed, or a worker does not start.
        """
        if not self._end.alive:
            raise WorkerError("the environment pool is closed; make a new one")
        found: list[EpisodeAnswer] = []
        deadline = time.monotonic() + timeout_s
        while True:
            left = 0.0 if found else max(0.0, deadline - time.monotonic())
            try:
                answer = self._answers.get(block=left > 0, timeout=left or None)
            except queue.Empty:
                return found
            if answer is None:
                self._workers.check()
                continue
            if (episode := self._episodes.get(answer.session)) is None:  # it was ended meanwhile
                continue
            self._asked.discard(answer.session)
            if answer.is_last:
                del self._numbers[episode], self._episodes[answer.session]
            found.append(EpisodeAnswer.of(answer, episode))

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()
        self._workers.join()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _called(self, episode: int) -> int:
        """The number of an episode that is called now."""
        number = self._numbers.get(episode)
        if number is None or number in self._asked:
            state = "is not under way" if number is None else "has not answered yet"
            raise StageOrderError(f"episode {episode} {state}; it takes a message after an opening, or a reply")
        self._asked.add(number)
        return number

    @contextlib.contextmanager
    def _failing(self, number: int, what: str) -> Any:
        """Makes a value that cannot be sent the failure of its episode."""
        if not self._end.alive:
            raise WorkerError("the environment pool is closed; make a new one")
        self._workers.check()
        try:
            yield
        except (TypeError, ValueError, RecursionError) as error:  # DataError of its length too
            self._workers.close(number)
            failure = f"{what} cannot be sent to the environment: {error}"
            self._answers.put(Answer(session=number, is_last=True, failure=failure))


def _json(value: Mapping[str, Any]) -> bytes:
    """A value for the environment.

    Raises:
        DataError: it is too long.
    """
    body = json.dumps(dict(value), default=plain).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise DataError(f"{len(body)} bytes of JSON, more than {MAX_MESSAGE_BYTES}")
    return body
