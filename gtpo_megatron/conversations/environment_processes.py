"""Environments in worker processes, for an engine's loop that never waits for them.

An episode stays in its worker, with many others. What is wrong with it fails it alone: an error, a lie, a call that is
late, too little memory. If a worker ends, does not answer or is too large, its episodes fail, since their state was in
it; those that were being called are at fault as far as can be told, and all others are :attr:`Event.is_lost`. An
episode that was not yet begun goes to another worker.
"""

import contextlib
import json
import queue
import time
import weakref
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.conversations.environment_crew import Crew, Event, Limits
from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.conversations.openai_form import plain, turn_json
from gtpo_megatron.errors import ConfigError, StageOrderError, WorkerError

__all__ = ["EnvironmentPool", "Event"]


class EnvironmentPool:
    """Runs the episodes of an environment in child processes.

    Children are new interpreters that import the environment by name, so the pool works in scripts, tests and Ray
    actors. They and all their descendants end with the parent, even if it is killed. The methods are for one thread.

    Args:
        name: ``module:Name`` or ``FILE.py:Name``, see :mod:`gtpo_megatron.conversations.environment`.
        num_workers: processes; at least 1.
        timeout_s: wall-clock limit of a call of an environment.
        memory_limit_mib: memory limit of a worker, for all its episodes, with shared mappings and child processes; 0:
            no limit.

    Raises:
        ConfigError: the environment cannot be imported, a tool cannot be described, or a number is out of range.
        WorkerError: a worker does not start.
    """

    def __init__(self, name: str, *, num_workers: int, timeout_s: float, memory_limit_mib: int) -> None:
        if num_workers < 1 or timeout_s <= 0 or memory_limit_mib < 0:
            raise ConfigError(
                f"num_workers={num_workers}, timeout_s={timeout_s}, memory_limit_mib={memory_limit_mib}: need at least "
                f"1 worker, more than 0 s and at least 0 MiB"
            )
        self._crew = Crew(Limits(name=name, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib))
        # Also if the pool is garbage-collected without close(), and at exit.
        self._end = weakref.finalize(self, self._crew.end)
        self._numbers: dict[int, int] = {}  # by episode, its number in the workers, where none is given twice
        self._episodes: dict[int, int] = {}  # the other way round
        self._asked: set[int] = set()  # numbers of those that wait for an event
        self._num_opened = 0
        try:
            self._crew.start(num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers' current supervisors; workers are their children."""
        return self._crew.supervisor_ids

    def open(self, episode: int, row: Mapping[str, Any]) -> None:
        """Begins an episode; its event has an opening or a failure.

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
            self._crew.open(self._num_opened, _json(row))

    def step(self, episode: int, message: Message) -> None:
        """Hands a turn of the policy to an episode; its event has a reply or a failure.

        Raises:
            StageOrderError: there is no such episode, or it has not answered yet.
            WorkerError: the pool is closed, or a worker does not start.
        """
        number = self._numbers.get(episode)
        if number is None or number in self._asked:
            state = "is not under way" if number is None else "has not answered yet"
            raise StageOrderError(f"episode {episode} {state}; it takes a message after an opening, or a reply")
        self._asked.add(number)
        with self._failing(number, "the policy's message"):
            self._crew.step(number, _json(turn_json(message)))

    def end(self, episode: int) -> None:
        """Ends an episode that is neither done nor failed, if it is under way; no event of it comes any more."""
        number = self._numbers.pop(episode, None)
        if number is not None:
            del self._episodes[number]
            self._asked.discard(number)
            self._crew.close(number)

    def poll(self, timeout_s: float) -> list[Event]:
        """The events since the last call; an episode that is done or has failed is under way no more.

        A worker that ends fails its episodes at once, so a failure may come of one that waits for the policy.

        Args:
            timeout_s: time to wait for the first; 0: none.

        Raises:
            WorkerError: the pool is closed, or a worker does not start.
        """
        if not self._end.alive:
            raise WorkerError("the environment pool is closed; make a new one")
        found: list[Event] = []
        deadline = time.monotonic() + timeout_s
        while True:
            left = 0.0 if found else max(0.0, deadline - time.monotonic())
            try:
                event = self._crew.events.get(block=left > 0, timeout=left or None)
            except queue.Empty:
                return found
            if event is None:
                self._crew.check()
                continue
            if (episode := self._episodes.get(event.episode)) is None:  # it was ended meanwhile
                continue
            self._asked.discard(event.episode)
            if event.failure or (event.reply is not None and event.reply.done):
                del self._numbers[episode], self._episodes[event.episode]
            found.append(event.of(episode))

    def close(self) -> None:
        """Ends the workers; the pool cannot be used afterwards."""
        self._end()
        self._crew.join()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _failing(self, number: int, what: str) -> Any:
        """Makes a value that cannot be sent the failure of its episode."""
        if not self._end.alive:
            raise WorkerError("the environment pool is closed; make a new one")
        self._crew.check()
        try:
            yield
        except (TypeError, ValueError, RecursionError) as error:  # DataError of its length too
            self._crew.close(number)
            self._crew.events.put(Event(episode=number, failure=f"{what} cannot be sent to the environment: {error}"))


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), default=plain).encode()
