"""What goes between an agent and the policy in an episode."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from gtpo_megatron.conversations.messages import Message, Opening, ToolCall
from gtpo_megatron.errors import DataError, StageOrderError
from gtpo_megatron.untrusted.text import shown

KEY_BYTES = 32
"""Random bytes of a key."""

MAX_GIVEN = 2
"""Times that an answer is given: a request may be repeated once, since the network may have lost the answer."""

REPEATS = "a request repeats all that was said and goes on, since an episode is one sequence of tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request for a turn of the policy.

    Attributes:
        opening: all messages, tools and texts that end the turn; or all tokens.
        unread: reason for which a message of the assistant cannot be read, by its place; of a turn of the policy, which
            is known by its place, nothing is read.
        is_enforced: whether the request asks for nothing that the endpoint takes and does not enforce.
    """

    opening: Opening
    unread: Mapping[int, str] = field(default_factory=dict)
    is_enforced: bool = True


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

    A request has the messages of all earlier ones, unchanged and in their order. Between them, where the policy was
    asked, stands at most one message of the assistant. It is the policy's turn by its place: its words, calls and keys
    are not looked at, since the tokens stay as they were sampled.

    Attributes:
        key: API key of the agent's requests.
        first: the agent's first action.
        num_unenforced: requests with a turn that asked for what is not enforced.
        num_refused: requests that were refused while the episode went on.
        first_refusal: reason of the first refusal; "" without one.
        refusal: reason of the first refusal that no turn of the policy has followed; "": none, or it was mended.
        was_left: whether the agent has ended while a request of its waited for its answer.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(KEY_BYTES)
        self.first = self._next = _future()
        self.num_unenforced = self.num_refused = 0
        self.first_refusal = self.refusal = ""
        self.was_left = False
        self._lock = threading.Lock()
        self._ended: Ended | None = None
        self._asked: Opening | None = None  # the request that waits for its answer
        self._answer: Future[Message] = Future()
        self._answered: tuple[Opening, Message] | None = None  # the last request that was, and its answer
        self._num_given = 0  # times that this answer was given to a client that was there
        self._ids: tuple[int, ...] = ()  # all that was said, of an agent that writes tokens
        self._said: list[Message] = []
        self._own: set[int] = set()  # places of the policy's turns in what was said
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._num_calls = 0

    def ask(self, asked: Asked) -> Message:
        """The policy's answer to all that was said; waits for it.

        A client that has waited too long may ask the same again: then the newer request is answered. If the answer was
        just given, it gets the same one: once, or as often as its client had gone (:meth:`was_lost`).

        Raises:
            DataError: what is asked does not go on where the last answer ended.
            StageOrderError: another request waits for its answer, or the episode has ended.
        """
        opening = asked.opening
        with self._lock:
            if self._ended is not None:
                raise StageOrderError("the episode has ended; nothing more is sampled for it")
            if self._asked is None and self._answered is not None and opening == self._answered[0]:
                return self._again(self._answered[1])
            if self._asked is None:
                added = self._added_tokens(opening) if opening.token_ids else self._added_messages(asked)
                self._asked, self._answer, self.refusal = opening, Future(), ""
                self.num_unenforced += not asked.is_enforced
                self._next.set_result(added)
            elif opening == self._asked:
                self._answer.set_exception(StageOrderError("the same was asked again; that request is answered"))
                self._answer = Future()
            else:
                raise StageOrderError("another request of this episode waits for its answer; ask one after the other")
            answer = self._answer
        return answer.result()

    def was_lost(self, asked: Asked) -> None:
        """Notes that the client had gone when it was answered: it may ask the same again."""
        with self._lock:
            if self._answered is not None and asked.opening == self._answered[0]:
                self._num_given -= 1

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
                self._answered, self._num_given = (self._asked, message), 1
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

    def _again(self, answer: Message) -> Message:
        if self._num_given >= MAX_GIVEN:
            raise DataError(
                f"the same was asked once more, after {self._num_given} answers to it; another sample for it would be "
                f"a branch, and an episode is one sequence"
            )
        self._num_given += 1
        return answer

    def _added_tokens(self, asked: Opening) -> Opening:
        """The tokens after those that were said."""
        size = len(self._ids)
        if self._said:
            raise DataError("the episode began with messages; it goes on with messages")
        if asked.token_ids[:size] != self._ids:
            place = _num_alike(self._ids, asked.token_ids)
            raise DataError(
                f"from token {place} on the request differs from the {size} that were said before; it repeats them and "
                f"goes on, since an episode is one sequence of tokens"
            )
        if len(asked.token_ids) == size:
            raise DataError(f"the request has no token after the {size} that were said before")
        self._ids = asked.token_ids
        return replace(asked, token_ids=asked.token_ids[size:])

    def _added_messages(self, asked: Asked) -> Opening:
        """The messages after those that were said; from then on they were said too."""
        if self._ids:
            raise DataError("the episode began with token ids; it goes on with token ids")
        opening, unread = asked.opening, asked.unread
        added = opening.messages[self._size_of_history(opening.messages, unread) :]
        if not added:
            raise DataError(
                f"the request has {len(opening.messages)} messages, none after the {len(self._said)} that were said "
                f"before; another answer to the same would be a branch, and an episode is one sequence"
            )
        if self._said:
            if foreign := next((one for one in added if one.role == "assistant"), None):
                raise DataError(
                    f"a message of the assistant was added, {shown(foreign.content)}, for which the policy speaks"
                )
            if opening.tools and (others := _other_tools(self._tools, opening.tools)):
                raise DataError(f"the tools are others than in the first request: {', '.join(others)}")
        else:
            if unread:
                raise DataError(next(iter(unread.values())))
            self._tools = opening.tools
        added = tuple(_with_names(self._said, added))
        self._said += added
        return replace(opening, messages=added)

    def _size_of_history(self, messages: Sequence[Message], unread: Mapping[int, str]) -> int:
        """How many of the messages were said before; a turn of the policy may be left out.

        Raises:
            DataError: what was said before is not all there.
        """
        place = 0
        for number, said in enumerate(self._said):
            if number in self._own:
                place += place < len(messages) and messages[place].role == "assistant"
                continue
            if place == len(messages):
                raise DataError(
                    f"the request ends before message {number} of those that were said before, {shown(said.content)} "
                    f"of {said.role}; {REPEATS}"
                )
            problem = f": {unread[place]}" if place in unread else _difference(said, messages[place])
            if problem:
                raise DataError(f"message {place}{problem}; {REPEATS}")
            place += 1
        return place

    def _with_ids(self, message: Message) -> Message:
        """A turn whose calls all have ids of their own, by which results name them.

        One that is made here has nine letters and digits, as Mistral demands.
        """
        calls: list[ToolCall] = []
        taken = {call.call_id for call in message.tool_calls}
        for call in message.tool_calls:
            new_id = call.call_id
            if not new_id or any(one.call_id == new_id for one in calls):
                while not new_id or new_id in taken:
                    self._num_calls += 1
                    new_id = f"call{self._num_calls:05}"
            calls.append(replace(call, call_id=new_id))
        return replace(message, tool_calls=tuple(calls))


def _future() -> "Future[Next]":
    """A future that an event loop cannot cancel: the agent goes on when a call is late, and says so in it."""
    made: Future[Next] = Future()
    made.set_running_or_notify_cancel()
    return made


def _difference(said: Message, now: Message) -> str:
    """How a message differs from the one that was said at its place; "": in nothing."""
    if now.role != said.role:
        return f" is {shown(now.content)} of {now.role}, where {shown(said.content)} of {said.role} was said before"
    if now.content != said.content:
        start = _num_alike(said.content, now.content)
        old, new = (shown(one.content[start:]) for one in (said, now))
        at = f" from character {start} on" if start else ""
        return f" of {now.role} differs in its content{at}: {new}, where {old} was said before"
    names = ("reasoning", "tool_calls", "malformed_calls", "call_id", *(["tool"] if now.tool else []))
    for name in names:
        if (old_value := getattr(said, name)) != (new_value := getattr(now, name)):
            return f" of {now.role} differs in {name}: {shown(new_value)}, where {shown(old_value)} was said before"
    return ""


def _num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _other_tools(told: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between tools, one line for each; their order means nothing."""
    old, new = ({str(one["function"]["name"]): one for one in tools} for tools in (told, now))
    added = [f"{shown(name)} is new" for name in new.keys() - old.keys()]
    gone = [f"{shown(name)} is missing" for name in old.keys() - new.keys()]
    changed = [f"{shown(name)} is described otherwise" for name in old.keys() & new.keys() if old[name] != new[name]]
    return sorted([*added, *gone, *changed])


def _with_names(before: Sequence[Message], added: Sequence[Message]) -> list[Message]:
    """The added messages with the tools' names in results, where clients have the calls' ids alone.

    Results of calls with one id are those of the calls in their order.
    """
    names: dict[str, list[str]] = {}
    named: list[Message] = []
    for message in (*before, *added):
        asked: dict[str, list[str]] = {}
        for call in message.tool_calls:
            asked.setdefault(call.call_id, []).append(call.name)
        names |= asked
        if message.role != "tool":
            named.append(message)
            continue
        calls = names.get(message.call_id)
        if not calls and not message.tool:
            raise DataError(f"a tool's result has tool_call_id={shown(message.call_id)}, which no call before has")
        name = (calls.pop(0) if len(calls) > 1 else calls[0]) if calls else ""
        named.append(message if message.tool else replace(message, tool=name))
    return named[len(before) :]
