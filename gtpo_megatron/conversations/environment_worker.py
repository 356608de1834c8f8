"""The worker of an environment pool: many episodes in one event loop.

Environments that are async wait in the loop together. Each other one has a thread of its own, for the whole episode, so
that it may keep what belongs to a thread; of these ``CALLS_AT_ONCE`` are called at the same time.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gtpo_megatron.conversations.chat_endpoint import HOST, address_of, keep_from_proxies, the_endpoint
from gtpo_megatron.conversations.environment import Episode, NamedEnvironment, resolve_environment
from gtpo_megatron.conversations.messages import MAX_MESSAGE_BYTES, message_of_json, opening_json, reply_json
from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.user_code.frames import Frame, FrameKind
from gtpo_megatron.user_code.worker import Channel

T = TypeVar("T")

CALLS_AT_ONCE = 16
"""Calls of environments that are not async that run at the same time in a worker; the limit of time begins with one."""

CANCEL_PATIENCE_S = 1.0
"""Time in which an async call that is late may end."""

STACK_BYTES = 1 << 20
"""Of a thread; it counts to the worker's memory, and an engine has hundreds of episodes."""


def load(arguments: Mapping[str, Any]) -> "EnvironmentService":
    """Imports the environment.

    Raises:
        ConfigError: it cannot be imported, a tool of it cannot be described, or there is no such network interface.
    """
    threading.stack_size(STACK_BYTES)
    host = address_of(arguments["interface"])
    keep_from_proxies(host)
    if host != HOST:
        the_endpoint(host)  # agents take the one that there is
    return EnvironmentService(resolve_environment(arguments["name"]), timeout_s=arguments["timeout_s"])


class _Served:
    """An episode as its worker has it."""

    def __init__(self, number: int, environment: NamedEnvironment) -> None:
        self.number = number
        self.thread = ThreadPoolExecutor(1)  # which begins with the first call
        self.episode = Episode(environment, self._in_thread)
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.began_at = time.monotonic()
        self.hangs = False

    @property
    def seconds(self) -> float:
        """Since the call under way has begun."""
        return time.monotonic() - self.began_at

    async def _in_thread(self, method: Callable[[], Any]) -> Any:
        def caught() -> tuple[Any, BaseException | None]:
            try:
                return method(), None
            except BaseException as error:  # noqa: BLE001 - a future does not take a StopIteration
                return None, error

        returned, error = await asyncio.get_running_loop().run_in_executor(self.thread, caught)
        if error is not None:
            raise error
        return returned


class EnvironmentService:
    """Serves the episodes that the pool opens.

    Attributes:
        facts: none.
    """

    facts: Mapping[str, Any] = {}

    def __init__(self, environment: NamedEnvironment, *, timeout_s: float) -> None:
        self._environment = environment
        self._where = f"environment {environment.name!r}"
        self._timeout_s = timeout_s
        self._served: dict[int, _Served] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)
        self._ended = asyncio.Event()

    def serve(self, channel: Channel) -> None:
        """Serves until the pool has gone; ends this process."""
        self._channel = channel
        try:
            asyncio.run(self._serve())
        except BaseException:  # noqa: BLE001 - SystemExit of a task that the environment has made, for instance
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)  # without waiting for threads that hang

    async def _serve(self) -> None:
        asyncio.get_running_loop().add_reader(self._channel, self._receive)
        await self._ended.wait()

    def _receive(self) -> None:
        frames = self._channel.receive()
        if frames is None:
            self._ended.set()
        for frame in frames or ():
            if frame.kind is FrameKind.OPEN:
                served = self._served[frame.session] = _Served(frame.session, self._environment)
                task = asyncio.create_task(self._serve_episode(served))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if frame.session in self._served:
                self._served[frame.session].frames.put_nowait(frame)

    async def _serve_episode(self, served: _Served) -> None:
        """Makes the calls of an episode one after the other, then forgets it, whatever it has raised."""
        goes_on = True
        try:
            while goes_on and (frame := await served.frames.get()).kind is not FrameKind.END:
                goes_on = await self._answer(served, frame)
            if not served.hangs:
                await self._limited(served, served.episode.close(), "close")
        except Exception as error:  # noqa: BLE001 - of close: the episode is over; the log says so
            sys.stderr.write(f"{error}\n")
        served.thread.shutdown(wait=False)
        del self._served[served.number]
        self._channel.send(FrameKind.CLOSED, served.number)

    async def _answer(self, served: _Served, frame: Frame) -> bool:
        """Makes a call and sends what comes of it; whether the episode goes on."""
        try:
            given = json.loads(frame.body)
            if frame.kind is FrameKind.OPEN:
                opening = await self._limited(served, served.episode.open(given), "reset")
                self._send(FrameKind.ANSWER, served, {"opening": opening_json(opening)})
                return True
            if given is None:  # a limit has ended it
                reply = await self._limited(served, served.episode.grade(), "get_reward")
            else:
                reply = await self._limited(served, served.episode.step(message_of_json(given)), "step")
            self._send(FrameKind.DONE if reply.done else FrameKind.ANSWER, served, {"reply": reply_json(reply)})
            return not reply.done
        except MemoryError:
            self._fail(served, f"{self._where}: MemoryError: the episode needs more memory than its worker has left")
            self._channel.send(FrameKind.RETIRES, body={"reason": "it has run out of memory"})
        except GTPOError as error:
            self._fail(served, str(error))
        except (TypeError, ValueError, RecursionError) as error:  # of JSON, from which numbers and depth may be barred
            self._fail(served, f"{self._where}: a message cannot be sent: {error}")
        except Exception as error:  # noqa: BLE001 - of a property of the environment's object, for instance
            self._fail(served, f"{self._where}: {type(error).__name__}: {printable(str(error))}")
        return False

    async def _limited(self, served: _Served, call: Coroutine[Any, Any, T], what: str) -> T:
        """The result of a call within its limit of time.

        Raises:
            DataError: it took longer, or has cancelled itself.
        """
        async with self._slots if served.episode.may_block else contextlib.nullcontext():
            served.began_at = time.monotonic()
            self._channel.send(FrameKind.BEGUN, served.number)
            task = asyncio.ensure_future(call)
            end = time.monotonic() + self._timeout_s
            while not task.done() and (left := end - time.monotonic()) > 0:
                await asyncio.wait({task}, timeout=left)
            if task.cancelled():
                raise DataError(f"{self._where}: {what} was cancelled, by the environment itself")
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_PATIENCE_S)
            if task.done() and not task.cancelled():
                task.exception()  # which nobody else would read
            if served.episode.may_block or not task.done():
                served.hangs = True
                self._channel.send(FrameKind.RETIRES, body={"reason": f"a call of {what} goes on in it"})
            raise DataError(f"{self._where}: {what} took longer than {self._timeout_s:g} s")

    def _fail(self, served: _Served, reason: str) -> None:
        self._send(FrameKind.FAILED, served, {"reason": reason})

    def _send(self, kind: FrameKind, served: _Served, body: dict[str, Any]) -> None:
        """Sends what has come of a call, and the facts of its episode.

        Raises:
            DataError: it is too long; the line names the environment.
            TypeError, ValueError, RecursionError: JSON does not have it.
        """
        text = json.dumps({"seconds": served.seconds, **served.episode.facts, **body}).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            problem = f"{len(text)} bytes of JSON, more than {MAX_MESSAGE_BYTES}"
            raise DataError(f"{self._where}: a message cannot be sent: {problem}")
        self._channel.send_json(kind, served.number, text)
