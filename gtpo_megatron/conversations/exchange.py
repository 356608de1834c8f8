"""What goes between an agent and the policy in an episode."""

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from gtpo_megatron.conversations.messages import Message, Opening
from gtpo_megatron.errors import DataError, StageOrderError
from gtpo_megatron.untrusted.text import shown

KEY_BYTES = 32
"""Random bytes of a key."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent has ended: what it returned, or what it raised."""

    returned: Any = None
    error: BaseException | None = None


Next = Opening | Ended
"""What an agent does next: it asks, of which here is what the policy has not read yet, or it ends."""


class Exchange:
    """What an agent asks and what it is answered in an episode.

    There is one request at a time, and each goes on where the last answer ended. Requests come from threads of the
    endpoint, answers from the environment's side.

    Attributes:
        key: API key of the agent's requests.
        first: the agent's first action.
        num_refused: requests that were refused while the episode went on.
        first_refusal: reason of the first refusal; "" without one.
        refusal: reason of the first refusal that no turn of the policy has followed; "": none, or it was mended.
        was_left: whether the agent has ended while a request of its waited for its answer.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(KEY_BYTES)
        self.first = self._next = _future()
        self.num_refused = 0
        self.first_refusal = self.refusal = ""
        self.was_left = False
        self._lock = threading.Lock()
        self._ended: Ended | None = None
        self._asked: Opening | None = None  # the request that waits for its answer
        self._answer: Future[Message] = Future()
        self._answered: tuple[Opening, Message] | None = None  # the last request that was, and its answer
        self._ids: tuple[int, ...] = ()  # all that was said, of an agent that writes tokens
        self._said: list[Message] = []
        self._own: set[int] = set()  # places of the policy's turns in what was said
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._num_calls = 0

    def ask(self, asked: Opening) -> Message:
        """The policy's answer to all that was said; waits for it.

        A client that has waited too long may ask the same again: then the newer request is answered. If the answer was
        just given, perhaps to nobody, it gets the same one.

        Raises:
            DataError: what is asked does not go on where the last answer ended.
            StageOrderError: another request waits for its answer, or the episode has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise StageOrderError("the episode has ended; nothing more is sampled for it")
            if self._asked is None and self._answered is not None and asked == self._answered[0]:
                return self._answered[1]
            if self._asked is None:
                added = self._added_tokens(asked) if asked.token_ids else self._added_messages(asked)
                self._asked, self._answer, self.refusal = asked, Future(), ""
                self._said, self._tools, self._ids = list(asked.messages), asked.tools, asked.token_ids
                self._next.set_result(added)
            elif asked == self._asked:
                self._answer.set_exception(StageOrderError("the same was asked again; that request is answered"))
                self._answer = Future()
            else:
                raise StageOrderError("another request of this episode waits for its answer; ask one after the other")
            answer = self._answer
        return answer.result()

    def refused(self, why: str) -> None:
        """Notes that a request was refused; after the end nothing depends on one any more.

        The agent may catch the error, or be a child process that dies of it, and return a reward all the same. Only a
        new turn mends it: then what the agent returns is of an answer that it got.
        """
        with self._lock:
            if self._ended is None:
                self.num_refused += 1
                self.first_refusal = self.first_refusal or why
                self.refusal = self.refusal or why

    def answer(self, message: Message) -> "Future[Next]":
        """Answers the request that waits; returns what the agent does next."""
        with self._lock:
            message = self._with_ids(message)
            if self._ids:
                self._ids += message.sampled.token_ids if message.sampled else ()
            else:
                self._own.add(len(self._said))
                self._said.append(message)
            self._next = _future()
            if self._ended is not None:
                self._next.set_result(self._ended)
            else:
                assert self._asked is not None, "an answer is to a request"
                self._answered = self._asked, message
                self._answer.set_result(message)
            self._asked = None
            return self._next

    def end(self, how: Ended) -> None:
        """The agent has ended, or its episode has; a request that waits is refused."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = how
            if self._asked is not None:
                self.was_left = True
                self._answer.set_exception(StageOrderError("the episode has ended, by a limit or a failure"))
            elif not self._next.done():
                self._next.set_result(how)

    def _added_tokens(self, asked: Opening) -> Opening:
        """The tokens after those that were said."""
        size = len(self._ids)
        if self._said:
            raise DataError("the episode began with messages; it goes on with messages")
        if asked.token_ids[:size] != self._ids:
            pairs = zip(self._ids, asked.token_ids, strict=False)
            place = next((place for place, (one, other) in enumerate(pairs) if one != other), len(asked.token_ids))
            raise DataError(
                f"from token {place} on the request differs from the {size} that were said before; it repeats them and "
                f"goes on, since an episode is one sequence of tokens"
            )
        if len(asked.token_ids) == size:
            raise DataError(f"the request has no token after the {size} that were said before")
        return Opening(token_ids=asked.token_ids[size:])

    def _added_messages(self, asked: Opening) -> Opening:
        """The messages after those that were said."""
        if self._ids:
            raise DataError("the episode began with token ids; it goes on with token ids")
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
        return replace(asked, messages=added)

    def _with_ids(self, message: Message) -> Message:
        """A turn whose calls all have ids, by which results name them; nine letters and digits, as Mistral demands."""
        calls = []
        for call in message.tool_calls:
            self._num_calls += 1
            calls.append(call if call.call_id else replace(call, call_id=f"call{self._num_calls:05}"))
        return replace(message, tool_calls=tuple(calls))


def _future() -> "Future[Next]":
    """A future that an event loop cannot cancel: the agent goes on when a call is late, and says so in it."""
    made: Future[Next] = Future()
    made.set_running_or_notify_cancel()
    return made


def _is_same_turn(said: Message, now: Message) -> bool:
    """Whether an agent has repeated a turn of the policy; it may have left out reasoning and white space around it."""
    calls, repeated = ([(one.name, dict(one.arguments)) for one in of.tool_calls] for of in (said, now))
    return now.role == "assistant" and now.content.strip() == said.content.strip() and calls == repeated
