"""Agents that know only an endpoint: functions that ask a model over HTTP, as environments.

An agent is a function ``agent(row, *, base_url, api_key)``, async or not, that returns the reward. It asks OpenAI's
chat completions or Responses or Anthropic's Messages at ``base_url``, or vLLM's ``/inference/v1/generate`` beside it;
each request is a turn of the policy, and the key is that of its episode alone.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from gtpo_megatron.conversations.chat_endpoint import UNKNOWN_KEY, the_endpoint
from gtpo_megatron.conversations.exchange import Ended, Next, Step
from gtpo_megatron.conversations.messages import Message, Opening, Reply
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.grade import checked
from gtpo_megatron.untrusted.text import shown


class AgentTurns:
    """An environment with ``reset(row)`` and ``step(message)`` around an agent.

    Args:
        agent: the function.
    """

    def __init__(self, agent: Callable[..., Any]) -> None:
        self._agent = agent
        self._is_async = inspect.iscoroutinefunction(agent)
        self._endpoint = the_endpoint()
        self._exchange = self._endpoint.open()
        self._running: asyncio.Task[None] | threading.Thread | None = None
        self._num_errors = 0
        self._num_unknown = 0

    @property
    def num_refused(self) -> int:
        """Requests that were refused so far, and those without an episode's key that came to this process."""
        return self._exchange.num_refused + self._num_unknown

    @property
    def num_unenforced(self) -> int:
        """Requests with a turn that asked for what is not enforced, so far."""
        return self._exchange.num_unenforced

    @property
    def first_refusal(self) -> str:
        """Why the first of them was; "": there is none."""
        return self._exchange.first_refusal or (UNKNOWN_KEY if self._num_unknown else "")

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Starts the agent; what it asks first."""
        call = partial(self._agent, dict(row), base_url=self._endpoint.url, api_key=self._exchange.key)
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
        self._endpoint.forget(self._exchange)
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
        self._num_unknown += self._endpoint.take_unknown()
        if isinstance(does, Ended):
            self._check(does)
            hint = f"; a request was refused meanwhile: {UNKNOWN_KEY}" if self._num_unknown else ""
            raise DataError(f"the agent returned without having asked the policy anything{hint}")
        return does.added

    def _reply(self, does: Next) -> Reply:
        self._num_unknown += self._endpoint.take_unknown()
        if isinstance(does, Step):
            added = does.added
            if does.after is None:
                return Reply(opening=added, num_tool_errors=self._num_errors)
            return Reply(
                messages=added.messages,
                token_ids=added.token_ids,
                stop=added.stop,
                after=does.after,
                is_again=does.is_again,
                num_tool_errors=self._num_errors,
            )
        self._check(does)
        reward = checked(does.returned, by="the agent")
        return Reply(reward=reward.value, parts=reward.parts, done=True, num_tool_errors=self._num_errors)

    def _check(self, does: Ended) -> None:
        """Raises what the agent has raised, or that it returned a reward without the answer that it had asked for."""
        refusal = f"its request was refused: {why}" if (why := self._exchange.refusal) else ""
        if does.error is not None:
            if refusal and _letters(why) not in _letters(str(does.error)):
                does.error.add_note(refusal)
            raise does.error
        if self._exchange.was_left:
            raise DataError(
                f"the agent returned {shown(does.returned)}, which is no reward: its last request was not answered "
                f"yet; give its client a longer timeout"
            )
        if refusal:
            raise DataError(f"the agent returned {shown(does.returned)}, which is no reward; {refusal}")


def _letters(text: str) -> str:
    """A text without what quoting it adds."""
    return "".join(filter(str.isalnum, text))


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
