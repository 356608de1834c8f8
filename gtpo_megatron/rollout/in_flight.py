"""The responses inside an engine: each is an episode of one or more turns, and several batches can be in flight.

A turn goes on from another one of its episode, mostly the last; the turns are a tree.

A step of vLLM advances all turns that are being sampled. When a turn ends, the episode has ended, or an environment is
asked what follows; the engine works for the others meanwhile.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gtpo_megatron.batch import EpisodeResult
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.requests import SampleRequest

LOOK_S = 0.5
"""Longest wait for an environment before the time limit is looked at again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAnswer:
    """What follows the beginning or a turn of an episode.

    Attributes:
        context_ids: tokens that the policy reads before its next turn: all of the prompt before the first one, then
            what others say. None: the episode has ended.
        result: the environment's account so far.
        stop: texts of which one ends the next turn, beside those of the run.
        after: number of the turn that the tokens follow, from 0; None: the last one.
        is_again: the next turn is another one after what that turn has read; ``context_ids`` is ().
        is_fresh: the next turn reads ``context_ids`` alone.
    """

    context_ids: tuple[int, ...] | None
    result: EpisodeResult
    stop: tuple[str, ...] = ()
    after: int | None = None
    is_again: bool = False
    is_fresh: bool = False


class TurnSource(Protocol):
    """Who answers the turns of the policy; every call returns at once. Implemented in ``rollout/conversation.py``."""

    in_rounds: bool
    """Whether the next turns are sampled together once all have been answered, so that a run repeats bit for bit."""

    limit_s: float
    """Most seconds of an episode's own; infinite: no limit."""

    max_prompt_tokens: int
    """Tokens of a fresh sequence's prompt that do not count to the limit of a response."""

    def open(self, episode: int, request: SampleRequest, *, stop_ids: Sequence[int]) -> None:
        """Begins an episode, whose turns these tokens end; its first answer is the prompt."""
        ...

    def turn_ended(self, episode: int, completion: Any, *, is_asked: bool = True) -> None:
        """Takes a turn, which is vLLM's ``CompletionOutput``, and asks what follows, unless it is not to be asked."""
        ...

    def cut(self, episode: int) -> bool:
        """Asks for the reward of an episode that a limit has ended, as its last answer; whether that can be asked."""
        ...

    def late(self, episode: int) -> TurnAnswer:
        """Fails an episode that has taken too long; nothing else comes of it."""
        ...

    def answers(self, *, within_s: float) -> dict[int, TurnAnswer]:
        """Waits until there is at least one answer, or so long; returns those that there are, by episode.

        An answer that ends the episode may come at any time, also while a turn is sampled.
        """
        ...

    def forget(self, episode: int) -> None:
        """Ends an episode that nothing more is asked about."""
        ...


@dataclass(kw_only=True, slots=True)
class Turn:
    """A turn of the policy.

    Attributes:
        context_ids: tokens before it that are not the policy's, since the turn that it goes on from; without such a
            turn, all that it reads.
        number: vLLM's number of the request.
        after: number of the turn that it goes on from, in the episode; None: of none.
        again: number of the turn whose context it has read too, so that both are answers to the same; None: its context
            is its own.
        completion: vLLM's ``CompletionOutput``; None while it is sampled.
    """

    context_ids: tuple[int, ...]
    number: int
    after: int | None = None
    again: int | None = None
    completion: Any = None


@dataclass(kw_only=True, slots=True)
class SampledEpisode:
    """A response.

    Attributes:
        request: request that it answers.
        turns: so far, in the order in which they were sampled; none if its environment could not begin.
        is_cut: an answer did not fit into the length limit.
        result: the environment's account; None without one.
        idle_s: seconds of its life in which the engine sampled nothing, because all episodes waited for environments.
        own_s: seconds in which it was sampled or waited for its environment, up to ``since``; what it waits for the
            others of its round is not among them.
        since: time from which on such seconds are not counted yet; infinite: there are none under way.
    """

    request: SampleRequest
    turns: list[Turn] = field(default_factory=list)
    is_cut: bool = False
    result: EpisodeResult | None = None
    idle_s: float = 0.0
    own_s: float = 0.0
    since: float = math.inf

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What the first turn has read."""
        return self.turns[0].context_ids if self.turns else self.request.prompt_ids

    def sequence(self, number: int | None) -> list[int]:
        """All tokens up to the end of a turn, with the prompt; none without a turn."""
        parts: list[Sequence[int]] = []
        while number is not None:
            turn = self.turns[number]
            parts += (turn.completion.token_ids if turn.completion is not None else (), turn.context_ids)
            number = turn.after
        return [token for part in reversed(parts) for token in part]

    def next_turn(self, answer: TurnAnswer) -> Turn:
        """The turn that an answer asks for, without a number yet."""
        if not self.turns or answer.is_fresh:
            return Turn(context_ids=answer.context_ids or (), number=-1)
        number = len(self.turns) - 1 if answer.after is None else answer.after
        if answer.is_again:
            earlier = self.turns[number]
            again = number if earlier.again is None else earlier.again
            return Turn(context_ids=earlier.context_ids, number=-1, after=earlier.after, again=again)
        return Turn(context_ids=answer.context_ids or (), number=-1, after=number)

    def num_response_tokens(self, turn: Turn, *, max_prompt_tokens: int) -> int:
        """Tokens after the prompt, whoever wrote them, that a turn reads.

        Of a fresh sequence's prompt, what is beyond the limit of prompts counts too.
        """
        if not self.turns:
            return 0
        first = turn
        while first.after is not None:
            first = self.turns[first.after]
        prompt = len(first.context_ids)
        is_first = first.again == 0 or first is self.turns[0]
        num_before = len(self.sequence(turn.after)) + len(turn.context_ids)
        return num_before - (prompt if is_first else min(prompt, max_prompt_tokens))


AddTurn = Callable[[SampleRequest, Sequence[int], int, int, Sequence[str]], int]
"""Adds a turn to vLLM: takes the request, the tokens before the turn, its index, how many tokens the response has so
far, and texts that end the turn beside those of the run; returns vLLM's number of it."""


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Requests that were begun together.

    Attributes:
        episodes: their keys, in order.
        open: keys of those that have not ended.
        version: policy version when they were begun; no token is older.
        add_turn: samples a turn of theirs.
        limit: most tokens of a response.
    """

    episodes: tuple[int, ...]
    open: set[int]
    version: int
    add_turn: AddTurn
    limit: int


class InFlight:
    """The batches that have not been taken.

    Args:
        engine: vLLM's ``LLMEngine``.
        environment: who answers the turns; None: an episode has one turn, after the request's prompt.
    """

    def __init__(self, engine: Any, environment: TurnSource | None = None) -> None:
        self._engine = engine
        self._environment = environment
        self._batches: dict[Hashable, _Batch] = {}
        self._episodes: dict[int, SampledEpisode] = {}
        self._tickets: dict[int, Hashable] = {}  # of an episode that has not ended, its batch's
        self._numbers: dict[int, int] = {}  # vLLM's number of a turn that is sampled -> its episode
        self._waiting: set[int] = set()  # episodes that wait for their environment
        self._answers: dict[int, TurnAnswer] = {}
        self._next = 0
        self._idle_s = 0.0  # so far

    def begin(
        self,
        requests: Sequence[SampleRequest],
        add_turn: AddTurn,
        *,
        version: int,
        limit: int,
        stop_ids: Sequence[int] = (),
        ticket: Hashable = None,
    ) -> Hashable:
        """Begins an episode for each request.

        Args:
            requests: requests of one batch.
            add_turn: adds a turn of theirs to vLLM.
            version: current policy version.
            limit: most tokens of a response, whoever wrote them.
            stop_ids: tokens that end a turn of theirs, for the environment.
            ticket: key of the batch; None: a number.

        Returns:
            The batch's ticket.
        """
        keys = tuple(range(self._next, self._next + len(requests)))
        self._next += len(requests)
        ticket = keys[0] if ticket is None else ticket
        self._batches[ticket] = _Batch(episodes=keys, open=set(keys), version=version, add_turn=add_turn, limit=limit)
        self._tickets |= dict.fromkeys(keys, ticket)
        self._episodes |= {
            key: SampledEpisode(request=request, idle_s=-self._idle_s, since=time.monotonic())
            for key, request in zip(keys, requests, strict=True)
        }
        for key, request in zip(keys, requests, strict=True):
            if self._environment is None:
                self._sample(key, Turn(context_ids=request.prompt_ids, number=-1))
            else:
                self._environment.open(key, request, stop_ids=stop_ids)
                self._waiting.add(key)
        return ticket

    def advance(self, *, limit_s: float) -> list[Hashable]:
        """Runs steps of vLLM, and takes answers of the environment, until all episodes have ended or the time is up.

        Args:
            limit_s: seconds after which no further step is started.

        Returns:
            Tickets of the complete batches.

        Raises:
            RolloutError: vLLM lost requests.
        """
        deadline = time.monotonic() + limit_s
        while self._tickets:
            if self._numbers:
                if not self._engine.has_unfinished_requests():
                    raise RolloutError(
                        f"vLLM lost {len(self._numbers)} requests: none is unfinished, but they did not come back; one "
                        f"of them is number {min(self._numbers)}"
                    )
                self._step()
            self._take_answers(deadline)
            if time.monotonic() >= deadline:
                break
        return [ticket for ticket, batch in self._batches.items() if not batch.open]

    def take(self, ticket: Hashable) -> list[SampledEpisode]:
        """Removes a complete batch; returns its episodes in order."""
        batch = self._batches.pop(ticket)
        assert not batch.open, "advance says when a batch is done"
        return [self._episodes.pop(key) for key in batch.episodes]

    def abort(self, ticket: Hashable) -> list[int]:
        """Removes a batch, and its turns from vLLM; returns their numbers."""
        batch = self._batches.pop(ticket)
        running = [number for number, key in self._numbers.items() if key in batch.open]
        self._engine.abort_request([str(number) for number in running])
        for number in running:
            del self._numbers[number]
        for key in batch.open:
            del self._tickets[key]
            self._waiting.discard(key)
            self._answers.pop(key, None)
            if self._environment is not None:
                self._environment.forget(key)
        return [turn.number for key in batch.episodes for turn in self._episodes.pop(key).turns]

    def check_push(self, version: int, *, max_staleness: int) -> None:
        """Checks that no batch in flight becomes too stale by a push.

        Args:
            version: version of the push.
            max_staleness: largest staleness of a batch's first token.

        Raises:
            WeightSyncError: a batch would be too stale; the message has both versions.
        """
        for batch in self._batches.values():
            if version - batch.version > max_staleness:
                raise WeightSyncError(
                    f"policy version {version} is pushed while {len(batch.episodes)} requests are in flight that were "
                    f"begun with version {batch.version}; rollout.max_staleness={max_staleness} allows at most so "
                    f"many versions between them: their step must take them first"
                )

    def _sample(self, key: int, turn: Turn, *, num_tokens: int = 0, stop: Sequence[str] = ()) -> None:
        """Begins a turn of an episode, after so many tokens of the response."""
        episode, batch = self._episodes[key], self._batches[self._tickets[key]]
        tokens = [*episode.sequence(turn.after), *turn.context_ids]
        turn.number = batch.add_turn(episode.request, tokens, len(episode.turns), num_tokens, stop)
        episode.since = time.monotonic()
        episode.turns.append(turn)
        self._numbers[turn.number] = key

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                key = self._numbers.pop(int(output.request_id))
                turn = self._episodes[key].turns[-1]
                turn.completion = output.outputs[0]
                if self._environment is None:
                    self._end(key)
                    continue
                in_time = not self._is_late(key)
                self._environment.turn_ended(key, turn.completion, is_asked=in_time)
                if in_time:
                    self._waiting.add(key)
                else:
                    self._end_late(key)

    def _is_late(self, key: int) -> bool:
        """Whether an episode has used up its time."""
        assert self._environment is not None
        episode = self._episodes[key]
        return episode.own_s + max(0.0, time.monotonic() - episode.since) > self._environment.limit_s

    def _end_late(self, key: int) -> None:
        """Lets an episode that has used up its time, and whose environment waits for it, be graded, or fails it."""
        assert self._environment is not None
        self._episodes[key].is_cut = True
        self._waiting.add(key)
        if not self._environment.cut(key):
            self._answers[key] = self._environment.late(key)

    def _look(self, *, within_s: float) -> None:
        """Takes the answers that there are, and fails the episodes whose environment has used up their time."""
        assert self._environment is not None
        found = self._environment.answers(within_s=within_s)
        for key in found.keys() & self._waiting:
            episode = self._episodes[key]
            episode.own_s += max(0.0, time.monotonic() - episode.since)
            episode.since = math.inf
        self._answers |= found
        for key in self._waiting - self._answers.keys():
            if not self._episodes[key].is_cut and self._is_late(key):
                self._answers[key] = self._environment.late(key)

    def _take_answers(self, deadline: float) -> None:
        if self._environment is None or not self._waiting:
            return
        is_idle = not self._numbers
        start = time.monotonic()
        self._look(within_s=min(max(deadline - start, 0.0), LOOK_S) if is_idle else 0.0)
        if self._environment.in_rounds and not is_idle:
            return
        if is_idle:
            self._idle_s += time.monotonic() - start
        # an environment may also end an episode whose turn is being sampled; that answer waits for the turn
        answered = self._answers.keys() & self._waiting
        if self._environment.in_rounds and answered != self._waiting:
            return
        for key in sorted(answered):
            self._go_on(key, self._answers.pop(key))

    def _go_on(self, key: int, answer: TurnAnswer) -> None:
        """Begins the turn after an answer, or ends the episode."""
        episode = self._episodes[key]
        self._waiting.discard(key)
        episode.result = answer.result
        assert self._environment is not None
        if answer.context_ids is not None:
            if self._is_late(key):
                self._end_late(key)
                return
            turn = episode.next_turn(answer)
            used = episode.num_response_tokens(turn, max_prompt_tokens=self._environment.max_prompt_tokens)
            if used < self._batches[self._tickets[key]].limit:
                self._sample(key, turn, num_tokens=used, stop=answer.stop)
                return
            episode.is_cut = True
            if self._environment.cut(key):
                self._waiting.add(key)
                return
        self._environment.forget(key)
        self._end(key)

    def _end(self, key: int) -> None:
        self._episodes[key].idle_s += self._idle_s  # it began at minus what was so far
        self._batches[self._tickets.pop(key)].open.discard(key)
