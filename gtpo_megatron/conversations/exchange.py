"""What goes between an agent and the policy in an episode, which is a tree of requests."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from gtpo_megatron.conversations.messages import Message, Opening, ToolCall
from gtpo_megatron.errors import DataError, StageOrderError
from gtpo_megatron.untrusted.text import shown

KEY_BYTES = 32
"""Random bytes of a key."""

MAX_GIVEN = 2
"""Times that an answer is given: a request may be repeated once, since the network may have lost the answer. If it
comes again, another answer is wanted."""

LOOK_S = 1.0
"""Between two looks whether the client that is answered before is still there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request for a turn of the policy.

    Attributes:
        opening: all messages, tools and texts that end the turn; or all tokens.
        unread: reason for which a message of the assistant cannot be read, by its place; of a turn of the policy, which
            is known by its place, nothing is read.
        is_enforced: whether the request asks for nothing that the endpoint takes and does not enforce.
        num_answers: how many turns it asks for.
    """

    opening: Opening
    unread: Mapping[int, str] = field(default_factory=dict)
    is_enforced: bool = True
    num_answers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What the policy is to answer next, of which here is what it has not read yet.

    Attributes:
        added: messages or tokens after the turn; without a turn, all of them, and the tools.
        after: number of the policy's turn that they follow, from 0; None: a new sequence begins with them.
        is_again: another answer to what that turn was sampled after; nothing is added.
    """

    added: Opening
    after: int | None = None
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How an agent has ended: what it returned, or what it raised."""

    returned: Any = None
    error: BaseException | None = None


Next = Step | Ended
"""What an agent does next: it asks, or it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A turn of the policy, and what it was sampled after.

    Attributes:
        said: all messages, the turn included.
        own: places of the policy's turns among them.
        tools: tools of the sequence.
        ids: all tokens, the turn's included, of an agent that writes tokens.
        num_ids_before: how many of them are not the turn's.
    """

    said: tuple[Message, ...] = ()
    own: frozenset[int] = frozenset()
    tools: tuple[Mapping[str, Any], ...] = ()
    ids: tuple[int, ...] = ()
    num_ids_before: int = 0


class Exchange:
    """What an agent asks and what it is answered in an episode.

    Requests come from threads of the endpoint, answers from the environment's side. They are answered one after the
    other, in the order in which they came.

    A request goes on from the turn whose history it repeats: all messages that were said up to it, unchanged and in
    their order. Between them, where the policy was asked, stands at most one message of the assistant. It is the
    policy's turn by its place: its words, calls and keys are not looked at, since the tokens stay as they were sampled;
    they only choose between turns with one history. A request that repeats no turn's history begins a new sequence,
    of which all is read as it stands.

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
        self._changed = threading.Condition()
        self._queue: deque[tuple[object, Opening]] = deque()  # requests that wait for those before them
        self._ended: Ended | None = None
        self._asked: Opening | None = None  # the request that waits for its answer
        self._has_gone: Callable[[], bool] = _never  # whether its client has
        self._answer: Future[Message] = Future()
        self._step = Step(added=Opening())  # what it asks, and below what it will be a turn after
        self._base = _Turn()
        self._answered: tuple[Opening, Message] | None = None  # the last request that was, and its answer
        self._num_given = 0  # times that this answer was given to a client that was there
        self._turns: list[_Turn] = []
        self._num_calls = 0

    def ask(self, asked: Asked, *, has_gone: "Callable[[], bool] | None" = None, is_another: bool = False) -> Message:
        """The policy's answer to all that was said; waits for it, and for those to earlier requests.

        A client that has waited too long may ask the same again: then the newer request is answered. If the answer was
        just given, it gets the same one: once, or as often as its client had gone (:meth:`was_lost`). While the client
        of the same request still waits, and after that, the same again is a request for another answer.

        Args:
            asked: the request.
            has_gone: whether its client has closed the connection.
            is_another: an answer of its own is wanted, whatever was given to the same request.

        Raises:
            DataError: what is asked cannot be read.
            StageOrderError: the client asks the same in another request, or the episode has ended.
        """
        opening, has_gone = asked.opening, has_gone or _never
        with self._changed:
            is_another |= self._wait(opening, has_gone)
            if self._asked is None:
                said, answered = self._answered or (None, None)
                if answered and said == opening and self._num_given < MAX_GIVEN and not is_another:
                    self._num_given += 1
                    return answered
                self._step, self._base = self._next_step(asked)
                self._asked, self._answer, self.refusal = opening, Future(), ""
                self.num_unenforced += not asked.is_enforced
                self._next.set_result(self._step)
            else:
                self._answer.set_exception(StageOrderError("the same was asked again; that request is answered"))
                self._answer = Future()
            self._has_gone, answer = has_gone, self._answer
        return answer.result()

    def _wait(self, opening: Opening, has_gone: Callable[[], bool]) -> bool:
        """Until no request waits, or the one that does is the same and its client has gone.

        Returns:
            Whether a client that is there has asked the same.
        """
        me = (object(), opening)
        is_another = any(other == opening for _, other in self._queue)
        self._queue.append(me)
        try:
            while self._ended is None and (self._asked is not None or self._queue[0] is not me):
                if self._asked == opening:
                    if self._has_gone() and not is_another:
                        break
                    is_another = True
                self._changed.wait(LOOK_S)
                if has_gone():
                    raise StageOrderError("its client has gone")
        finally:
            self._queue.remove(me)
            self._changed.notify_all()
        if self._ended is not None:
            raise StageOrderError("the episode has ended; nothing more is sampled for it")
        return is_another

    def was_lost(self, asked: Asked) -> None:
        """Notes that the client had gone when it was answered: it may ask the same again."""
        with self._changed:
            if self._answered is not None and asked.opening == self._answered[0]:
                self._num_given -= 1

    def refused(self, why: str) -> None:
        """Notes that a request was refused; after the end nothing depends on one any more.

        The agent may catch the error, or be a child process that dies of it, and return a reward all the same. Only a
        new turn mends it: then what the agent returns is of an answer that it got.
        """
        with self._changed:
            if self._ended is None:
                self.num_refused += 1
                self.first_refusal = self.first_refusal or why
                self.refusal = self.refusal or why

    def answer(self, message: Message) -> "Future[Next]":
        """Answers the request that waits; returns what the agent does next."""
        with self._changed:
            message = self._with_ids(message)
            base = self._base
            if base.ids:
                ids = base.ids + (message.sampled.token_ids if message.sampled else ())
                self._turns.append(replace(base, ids=ids, num_ids_before=len(base.ids)))
            else:
                self._turns.append(
                    replace(base, said=(*base.said, message), own=base.own | {len(base.said)}),
                )
            self._next = _future()
            if self._ended is not None:
                self._next.set_result(self._ended)
            else:
                assert self._asked is not None, "an answer is to a request"
                self._answered, self._num_given = (self._asked, message), 1
                self._answer.set_result(message)
            self._asked = None
            self._changed.notify_all()
            return self._next

    def end(self, how: Ended) -> None:
        """The agent has ended, or its episode has; a request that waits is refused."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = how
            if self._asked is not None:
                self.was_left = True
                self._answer.set_exception(StageOrderError("the episode has ended, by a limit or a failure"))
            elif not self._next.done():
                self._next.set_result(how)
            self._changed.notify_all()

    def _next_step(self, asked: Asked) -> tuple[Step, _Turn]:
        """What the policy reads for a request, and all that was said then.

        Raises:
            DataError: a message cannot be read, or the episode has tokens and messages.
        """
        if self._turns and bool(asked.opening.token_ids) != bool(self._turns[0].ids):
            kind = "token ids" if self._turns[0].ids else "messages"
            raise DataError(f"the episode began with {kind}; it goes on with {kind}")
        return self._step_of_tokens(asked.opening) if asked.opening.token_ids else self._step_of_messages(asked)

    def _step_of_tokens(self, opening: Opening) -> tuple[Step, _Turn]:
        ids = opening.token_ids
        before = [(turn.num_ids_before, number) for number, turn in enumerate(self._turns)]
        for size, number in sorted(before, reverse=True):
            turn = self._turns[number]
            if ids == turn.ids[:size]:
                return Step(added=replace(opening, token_ids=()), after=number, is_again=True), _Turn(ids=ids)
            if len(ids) > len(turn.ids) and ids[: len(turn.ids)] == turn.ids:
                added = replace(opening, token_ids=ids[len(turn.ids) :])
                return Step(added=added, after=number), _Turn(ids=ids)
        return Step(added=opening), _Turn(ids=ids)

    def _step_of_messages(self, asked: Asked) -> tuple[Step, _Turn]:
        opening, unread = asked.opening, asked.unread
        found = [(history, number) for number in range(len(self._turns)) if (history := self._history(number, asked))]
        if not found:
            if unread:
                raise DataError(next(iter(unread.values())))
            said = tuple(_with_names((), opening.messages))
            added = replace(opening, messages=said)
            return Step(added=added), _Turn(said=said, tools=opening.tools)
        (_, size), number = max(found)
        turn = self._turns[number]
        if size == len(opening.messages):
            base = replace(turn, said=turn.said[:-1], own=turn.own - {len(turn.said) - 1})
            return Step(added=replace(opening, messages=()), after=number, is_again=True), base
        messages = tuple(_with_names(turn.said, opening.messages[size:]))
        base = replace(turn, said=(*turn.said, *messages))
        return Step(added=replace(opening, messages=messages), after=number), base

    def _history(self, number: int, asked: Asked) -> tuple[int, int] | None:
        """How well a request fits to a turn's history.

        Returns:
            How many of the policy's turns in it the request tells word for word, and how many of its messages are that
            history; None: it does not go on from that turn.
        """
        turn, messages = self._turns[number], asked.opening.messages
        place = num_alike = 0
        for index, said in enumerate(turn.said):
            if index in turn.own:
                if place < len(messages) and messages[place].role == "assistant":
                    num_alike += messages[place].content == said.content
                    place += 1
                continue
            if place == len(messages) or place in asked.unread or _differs(said, messages[place]):
                return None
            place += 1
        if any(one.role == "assistant" for one in messages[place:]):
            return None
        if asked.opening.tools and _by_name(asked.opening.tools) != _by_name(turn.tools):
            return None
        return num_alike, place

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


def _never() -> bool:
    return False


def _differs(said: Message, now: Message) -> bool:
    """Whether a message is another than the one that was said at its place; a result may lack its tool's name."""
    names = ["role", "content", "reasoning", "tool_calls", "malformed_calls", "call_id"]
    names += ["tool"] if now.tool else []
    return any(getattr(said, name) != getattr(now, name) for name in names)


def _by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tools by their names: their order means nothing."""
    return {str(one["function"]["name"]): one for one in tools}


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
