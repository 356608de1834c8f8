"""Agents that know only an endpoint: functions that ask a model over HTTP, as environments.

An agent is a function ``agent(row, *, base_url, api_key)``, async or not, that returns the reward. It asks OpenAI's
chat completions at ``base_url``; each request is a turn of the policy, and the key is that of its episode alone.
"""

import asyncio
import inspect
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gtpo_megatron.conversations.messages import Message, Opening, Reply
from gtpo_megatron.errors import DataError, StageOrderError
from gtpo_megatron.rewards.grade import checked
from gtpo_megatron.untrusted.text import shown

KEY_BYTES = 32
"""Random bytes of a key."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent has ended: what it returned, or what it raised."""

    returned: Any = None
    error: BaseException | None = None


Next = Opening | Ended
"""What an agent does next: it asks, where messages are those that the policy has not read yet, or it ends."""


class Exchange:
    """What an agent asks and what it is answered in an episode.

    There is one request at a time, and each goes on where the last answer ended. Requests come from threads of the
    endpoint, answers from the environment's side.

    Attributes:
        key: that the agent's requests have.
        first: what the agent does first.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(KEY_BYTES)
        self.first = self._next = _future()
        self._lock = threading.Lock()
        self._ended: Ended | None = None
        self._asked: Opening | None = None  # the request that waits for its answer
        self._answer: Future[Message] = Future()
        self._said: list[Message] = []
        self._own: set[int] = set()  # places of the policy's turns in what was said
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._num_calls = 0

    def ask(self, asked: Opening) -> Message:
        """The policy's answer to all that was said; waits for it.

        A client that has waited too long may ask the same again: then the newer request is answered.

        Raises:
            DataError: what is asked does not go on where the last answer ended.
            StageOrderError: another request waits for its answer, or the episode has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise StageOrderError("the episode has ended; nothing more is sampled for it")
            if self._asked is None:
                added = self._added(asked)
                self._asked, self._answer = asked, Future()
                self._said, self._tools = list(asked.messages), asked.tools
                self._next.set_result(replace(asked, messages=added))
            elif asked == self._asked:
                self._answer.set_exception(StageOrderError("the same was asked again; that request is answered"))
                self._answer = Future()
            else:
                raise StageOrderError("another request of this episode waits for its answer; ask one after the other")
            answer = self._answer
        return answer.result()

    def answer(self, message: Message) -> "Future[Next]":
        """Answers the request that waits; returns what the agent does next."""
        with self._lock:
            message = self._with_ids(message)
            self._own.add(len(self._said))
            self._said.append(message)
            self._next = _future()
            self._asked = None
            if self._ended is not None:
                self._next.set_result(self._ended)
            else:
                self._answer.set_result(message)
            return self._next

    def end(self, how: Ended) -> None:
        """The agent has ended, or its episode has; a request that waits is refused."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = how
            if self._asked is not None:
                self._answer.set_exception(StageOrderError("the episode has ended, by a limit or a failure"))
            elif not self._next.done():
                self._next.set_result(how)

    def _added(self, asked: Opening) -> tuple[Message, ...]:
        """The messages after those that were said."""
        size, messages = len(self._said), asked.messages
        for place, (said, now) in enumerate(zip(self._said, messages, strict=False)):
            if not (_is_same_turn(said, now) if place in self._own else said == now):
                raise DataError(
                    f"message {place} is {shown(now.content)} of {now.role}, where {shown(said.content)} of "
                    f"{said.role} was said before; a request repeats all that was said and goes on, since an episode "
                    f"is one sequence of tokens"
                )
        if len(messages) <= size:
            raise DataError(f"the request has {len(messages)} messages, none after the {size} that were said before")
        if self._said and asked.tools != self._tools:
            raise DataError("the tools are others than in the first request; the policy was told of those")
        added = messages[size:]
        if self._said and any(one.role == "assistant" for one in added):
            raise DataError("a message of the assistant was added, for which the policy speaks")
        return added

    def _with_ids(self, message: Message) -> Message:
        """A turn whose calls all have ids, by which results name them; nine letters and digits, as Mistral demands."""
        calls = []
        for call in message.tool_calls:
            self._num_calls += 1
            calls.append(call if call.call_id else replace(call, call_id=f"call{self._num_calls:05}"))
        return replace(message, tool_calls=tuple(calls))


class AgentTurns:
    """An environment with ``reset(row)`` and ``step(message)`` around an agent.

    Args:
        agent: the function.
        open_exchange: makes the exchange of an episode; returns it and the URL where it is served.
    """

    def __init__(
        self, agent: Callable[..., Any], open_exchange: Callable[[], tuple[Exchange, str, Callable[[], None]]]
    ) -> None:
        self._agent = agent
        self._is_async = inspect.iscoroutinefunction(agent)
        self._exchange, self._base_url, self._close_exchange = open_exchange()
        self._running: asyncio.Task[None] | threading.Thread | None = None
        self._num_errors = 0
        self._has_asked = False

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Starts the agent; what it asks first."""
        call = partial(self._agent, dict(row), base_url=self._base_url, api_key=self._exchange.key)
        if self._is_async:
            self._running = asyncio.ensure_future(self._run_async(call))
        else:
            # not the episode's thread, which waits here for what the agent asks
            self._running = threading.Thread(target=self._run, args=(call,), name="agent", daemon=True)
            self._running.start()
        return self._once(self._exchange.first, self._opening)

    def step(self, message: Message) -> Any:
        """Answers the agent; what it asks then, or its reward."""
        self._num_errors = len(message.malformed_calls)
        return self._once(self._exchange.answer(message), self._reply)

    def close(self) -> Any:
        """Ends the agent: what it asks from now on is refused; an async one is cancelled."""
        self._close_exchange()
        self._exchange.end(Ended())
        if isinstance(self._running, threading.Thread):
            self._running.join()
        elif self._running is not None:
            self._running.cancel()
            return asyncio.wait({self._running})
        return None

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._exchange.end(Ended(call()))
        except BaseException as error:  # noqa: BLE001 - the episode's failure, SystemExit too
            self._exchange.end(Ended(error=error))

    async def _run_async(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            self._exchange.end(Ended(await call()))
        except asyncio.CancelledError:
            self._exchange.end(Ended(error=DataError("the agent was cancelled")))
            raise
        except BaseException as error:  # noqa: BLE001 - the episode's failure, SystemExit too
            self._exchange.end(Ended(error=error))

    def _once(self, done: "Future[Next]", then: Callable[[Next], Any]) -> Any:
        """``then`` of what the agent does next, when it does; of an async agent, an awaitable of it."""
        if not self._is_async:
            return then(done.result())

        async def later() -> Any:
            return then(await asyncio.wrap_future(done))

        return later()

    def _opening(self, does: Next) -> Opening:
        if isinstance(does, Ended):
            if does.error is not None:
                raise does.error
            raise DataError("the agent returned without having asked the policy anything")
        return does

    def _reply(self, does: Next) -> Reply:
        if isinstance(does, Opening):
            return Reply(messages=does.messages, num_tool_errors=self._num_errors)
        if does.error is not None:
            raise does.error
        reward = checked(does.returned, by="the agent")
        return Reply(reward=reward.value, parts=reward.parts, done=True, num_tool_errors=self._num_errors)


def is_agent(function: Callable[..., Any]) -> bool:
    """Whether a function is called as an agent is, and not without arguments, as what makes an environment."""
    if inspect.isclass(function):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind({}, base_url="", api_key="")
    except (TypeError, ValueError):
        return False
    return any(one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in signature.parameters.values())


def _future() -> "Future[Next]":
    """A future that an event loop cannot cancel: the agent goes on when a call is late, and says so in it."""
    made: Future[Next] = Future()
    made.set_running_or_notify_cancel()
    return made


def _is_same_turn(said: Message, now: Message) -> bool:
    """Whether an agent has repeated a turn of the policy; it may have left out reasoning and white space around it."""
    calls, repeated = ([(one.name, dict(one.arguments)) for one in of.tool_calls] for of in (said, now))
    return now.role == "assistant" and now.content.strip() == said.content.strip() and calls == repeated
