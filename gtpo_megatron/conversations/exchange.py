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

MAX_REPEATED = 1
"""Times that a request may be repeated right after its answer and get the same one, since the network may have lost it.
If it comes again, another answer is wanted."""

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


@dataclass(kw_only=True, slots=True)
class _Turn:
    """A turn of the policy, and what it was sampled after.

    Attributes:
        asked: the request that it answers; None: of none yet.
        answer: it.
        told: its text as its client has it.
        is_lost: whether its client had gone when it was answered.
        is_continued: whether a later turn goes on from it.
        said: all messages, the turn included.
        own: places of the policy's turns among them.
        tools: tools of the sequence.
        ids: all tokens, the turn's included, of an agent that writes tokens.
        num_ids_before: how many of them are not the turn's.
    """

    asked: Opening | None = None
    answer: Message | None = None
    told: str = ""
    is_lost: bool = False
    is_continued: bool = False
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
    policy's turn by its place, whatever its words, calls and keys say, since the tokens stay as they were sampled; they
    only choose between turns with one history. A request that repeats no turn's history begins a new sequence, of which
    all is read as it stands; so does one with other words in the place of a turn that was gone on from already.

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
        self._queue: deque[tuple[int, Opening]] = deque()  # requests that wait for those before them
        self._num_came = self._num_at_refusal = self._num_at_answer = 0  # requests so far, and at the last of these
        self._ended: Ended | None = None
        self._asked: Opening | None = None  # the request that waits for its answer, and its number
        self._number = 0
        self._has_gone: Callable[[], bool] = _never  # whether its client has
        self._answer: Future[Message] = Future()
        self._step = Step(added=Opening())  # what it asks, and below what it will be a turn after
        self._base = _Turn()
        self._repeated: list[Opening] = []  # requests that got the answer before once more
        self._turns: list[_Turn] = []
        self._num_calls = 0

    def ask(self, asked: Asked, *, has_gone: Callable[[], bool] | None = None, is_another: bool = False) -> Message:
        """The policy's answer to all that was said; waits for it, and for those to earlier requests.

        A client that has waited too long may ask the same again: then the newer request is answered. An answer whose
        client had gone (:meth:`was_lost`) is given to the next one that asks the same; and so is, once, the answer that
        was just given. Else, and while the client of the same request still waits, the same again is a request for
        another answer.

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
            self._num_came += 1
            number = self._num_came
            is_another |= self._wait(number, opening, has_gone)
            if self._asked is None:
                if (given := self._given(opening, is_another=is_another)) is not None:
                    return given
                self._step, self._base = self._next_step(asked)
                if self._step.after is not None and not self._step.is_again:
                    self._turns[self._step.after].is_continued = True
                self._asked, self._answer = opening, Future()
                if number > self._num_at_refusal:
                    self.refusal = ""
                self.num_unenforced += not asked.is_enforced
                self._next.set_result(self._step)
            else:
                self._answer.set_exception(StageOrderError("the same was asked again; that request is answered"))
                self._answer = Future()
            self._number, self._has_gone, answer = number, has_gone, self._answer
        return answer.result()

    def _given(self, opening: Opening, *, is_another: bool) -> Message | None:
        """The answer that was given to the same request, where it may have been lost."""
        for turn in self._turns:
            if turn.is_lost and turn.asked == opening:
                turn.is_lost = False
                return turn.answer
        if is_another or not self._turns or self._turns[-1].asked != opening:
            return None
        if self._repeated.count(opening) >= MAX_REPEATED:
            return None
        self._repeated.append(opening)
        return self._turns[-1].answer

    def _wait(self, number: int, opening: Opening, has_gone: Callable[[], bool]) -> bool:
        """Until no request waits, or the one that does is the same and its client has gone.

        Returns:
            Whether a client that is there has asked the same.
        """
        me = (number, opening)
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

    def was_lost(self, answers: Sequence[Message]) -> None:
        """Notes that the client had gone when it was given these: it may ask the same again."""
        with self._changed:
            for turn in self._turns:
                turn.is_lost |= any(turn.answer is one for one in answers)

    def refused(self, why: str) -> None:
        """Notes that a request was refused; after the end nothing depends on one any more.

        The agent may catch the error, or be a child process that dies of it, and return a reward all the same. Only a
        new turn mends it: then what the agent returns is of an answer that it got.
        """
        with self._changed:
            if self._ended is None:
                self.num_refused += 1
                self._num_at_refusal = self._num_came
                self.first_refusal = self.first_refusal or why
                self.refusal = self.refusal or why

    def answer(self, message: Message) -> "Future[Next]":
        """Answers the request that waits; returns what the agent does next."""
        with self._changed:
            message = self._with_ids(message)
            assert self._asked is not None or self._ended is not None, "an answer is to a request"
            base = self._base
            turn = _Turn(asked=self._asked, answer=message, tools=base.tools)
            if base.ids:
                turn.ids = base.ids + (message.sampled.token_ids if message.sampled else ())
                turn.num_ids_before = len(base.ids)
            else:
                turn.said, turn.own = (*base.said, message), base.own | {len(base.said)}
                turn.told = told_text(message, self._step.added.stop)
            self._turns.append(turn)
            self._num_at_answer = self._num_came
            self._next = _future()
            if self._ended is not None:
                self._next.set_result(self._ended)
            else:
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
                # one that came beside another that was answered, and was given up, is no last request
                self.was_left = self._number > self._num_at_answer
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
        for number, turn in reversed(list(enumerate(self._turns))):
            if ids == turn.ids[: turn.num_ids_before]:
                return Step(added=replace(opening, token_ids=()), after=number, is_again=True), _Turn(ids=ids)
        found = [(len(turn.ids), number) for number, turn in enumerate(self._turns) if ids[: len(turn.ids)] == turn.ids]
        if not found:
            return Step(added=opening), _Turn(ids=ids)
        size, number = max(found)
        if size == len(ids):
            raise DataError(f"the request has no token after the {size} that were said before")
        return Step(added=replace(opening, token_ids=ids[size:]), after=number), _Turn(ids=ids)

    def _step_of_messages(self, asked: Asked) -> tuple[Step, _Turn]:
        opening, unread = asked.opening, asked.unread
        found = [(history, number) for number in range(len(self._turns)) if (history := self._history(number, asked))]
        if not found:
            if unread:
                raise DataError(next(iter(unread.values())))
            said = tuple(_with_names((), opening.messages))
            added = replace(opening, messages=said)
            return Step(added=added), _Turn(said=said, tools=opening.tools)
        (_, _, size), number = max(found)
        turn = self._turns[number]
        if size == len(opening.messages):
            own = turn.own - {len(turn.said) - 1}
            base = _Turn(said=turn.said[:-1], own=own, tools=turn.tools)
            return Step(added=replace(opening, messages=()), after=number, is_again=True), base
        messages = tuple(_with_names(turn.said, opening.messages[size:]))
        base = _Turn(said=(*turn.said, *messages), own=turn.own, tools=turn.tools)
        return Step(added=replace(opening, messages=messages), after=number), base

    def _history(self, number: int, asked: Asked) -> tuple[int, int, int] | None:
        """How well a request fits to a turn's history.

        Returns:
            Minus how many results of tools it has behind the turn whose calls were not said, how many of the policy's
            turns it tells as they were told, and how many of its messages are the history; None: it does not go on from
            that turn.
        """
        turn, messages = self._turns[number], asked.opening.messages
        place = num_alike = 0
        is_told = True
        for index, said in enumerate(turn.said):
            if index in turn.own:
                is_told = True  # of the last one; one that is left out is told in no other words
                if place < len(messages) and messages[place].role == "assistant":
                    is_told = self._is_told(turn, index, messages[place])
                    num_alike += is_told
                    place += 1
                continue
            if place == len(messages) or place in asked.unread or _differs(said, messages[place]):
                return None
            place += 1
        added = messages[place:]
        results = [one for one in added if one.role == "tool"]
        if any(one.role == "assistant" for one in added) or (turn.is_continued and not (is_told or results)):
            return None
        if asked.opening.tools and _by_name(asked.opening.tools) != _by_name(turn.tools):
            return None
        ids = {call.call_id for said in turn.said for call in said.tool_calls}
        if any(not one.tool and one.call_id not in ids for one in results):
            return None
        return -sum(one.call_id not in ids for one in results), num_alike, place

    def _is_told(self, turn: _Turn, index: int, now: Message) -> bool:
        """Whether a message tells the policy's turn at a place as the endpoint has told it."""
        said = turn.said[index]
        told = next((one.told for one in self._turns if one.answer is said), said.content)
        calls = [[(call.call_id, call.name) for call in one.tool_calls] for one in (said, now)]
        is_thought_told = not now.reasoning or now.reasoning.strip() == said.reasoning.strip()
        return now.content.strip() == told.strip() and calls[0] == calls[1] and is_thought_told

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


def told_text(turn: Message, stop: Sequence[str]) -> str:
    """The text of a turn as clients have it: up to what ended it, and all of it if a call cannot be read."""
    return before_stop(turn.raw_text or turn.content, stop)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of the texts that end a turn, as OpenAI gives it."""
    ended_by = stop_in(text, stop)
    return text[: text.index(ended_by)] if ended_by else text


def stop_in(text: str, stop: Sequence[str]) -> str:
    """The first in a text of the texts that end a turn; "": none is there."""
    return min((one for one in stop if one in text), key=text.index, default="")


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
