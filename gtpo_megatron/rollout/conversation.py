"""The environment's side of an engine's episodes: what it says becomes tokens, what the policy says a message."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.batch import (
    BRANCHES,
    ENDED_UNGRADED,
    ENVIRONMENT_SECONDS,
    REQUESTS_REFUSED,
    REQUESTS_UNENFORCED,
    EpisodeResult,
)
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.conversations.environment import resolve_environment
from gtpo_megatron.conversations.environment_pool import EnvironmentPool, EpisodeAnswer
from gtpo_megatron.conversations.messages import Message, Opening, Reply, TurnStats
from gtpo_megatron.conversations.template_bridge import TemplateBridge
from gtpo_megatron.data.chat_template import TemplateInputs, is_sentencepiece_only, today
from gtpo_megatron.errors import DataError, RolloutError
from gtpo_megatron.rollout.in_flight import TurnAnswer
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.untrusted.text import shown

TURNS, TOOL_ERRORS, MALFORMED = "turns", "tool_errors", "malformed_calls"
"""Parts of every result beside the seconds: turns of the policy, calls of tools that failed as the environment counts
them, and calls that could not be read, which an environment may pass over. Those of ``batch.py`` are in some only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A turn of the policy.

    Attributes:
        token_ids: what it wrote.
        tools: tools that it might call.
        num_before: tokens that it had read.
    """

    token_ids: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    num_before: int


@dataclass(kw_only=True, slots=True)
class _EpisodeState:
    """What has happened in an episode so far.

    Attributes:
        stop_ids: tokens that end a turn.
        turns: turns of the policy, in the order in which they were sampled.
        tools: tools that the policy may call in the next turn.
        num_tokens: tokens that it reads before that.
        num_branches: turns that did not go on from the one before them.
        is_branch: whether the next turn will not.
        writes_tokens: whether the environment writes tokens instead of messages.
        has_ended: whether the environment has ended, so that it takes no more calls.
        is_ungraded: whether the environment's reward, which comes at the end, has not come; None: turns may have
            rewards.
        is_graded_anywhere: whether it can be asked for after a limit has ended the episode.
        num_refused: requests of the agent that were refused; None: there is no agent.
        num_unenforced: requests of the agent that asked for what is not enforced; None: there is no agent.
        refusal: reason of the first refusal.
    """

    stop_ids: tuple[int, ...]
    turns: list[_Turn] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    num_tokens: int = 0
    writes_tokens: bool = False
    has_ended: bool = False
    is_ungraded: bool | None = None
    is_graded_anywhere: bool = False
    num_refused: int | None = None
    num_unenforced: int | None = None
    refusal: str = ""
    num_branches: int = 0
    is_branch: bool = False
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    num_tool_errors: int = 0
    num_malformed: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return len(self.turns)

    def result(self, failure: str = "") -> EpisodeResult:
        """The result so far; with a failure, of an episode that has failed."""
        counts = {
            **{TURNS: self.num_turns, TOOL_ERRORS: self.num_tool_errors, ENVIRONMENT_SECONDS: self.seconds},
            **{ENDED_UNGRADED: self.is_ungraded, REQUESTS_REFUSED: self.num_refused},
            REQUESTS_UNENFORCED: self.num_unenforced,
            BRANCHES: self.num_branches or None,
            MALFORMED: None if self.writes_tokens else self.num_malformed,  # who writes tokens reads the calls
        }
        own = {name: float(value) for name, value in counts.items() if value is not None}
        return EpisodeResult(
            reward=self.reward,
            turn_rewards=tuple(self.turn_rewards),
            parts={**self.parts, **own},
            failure=failure,
            refusal=self.refusal,
        )

    def take(self, answer: EpisodeAnswer) -> None:
        """Takes what an answer says beside the opening, the reply or the failure."""
        self.seconds += answer.seconds
        self.has_ended = bool(answer.failure)
        if answer.opening is not None and answer.is_graded_last:
            self.is_ungraded, self.is_graded_anywhere = True, answer.is_graded_anywhere
        if answer.num_refused is not None:  # None of a worker that has ended
            self.num_refused, self.refusal = answer.num_refused, answer.refusal
            self.num_unenforced = answer.num_unenforced


class EnvironmentTurns:
    """``in_flight.TurnSource`` with environments in processes of their own.

    Args:
        config: the environment and its limits.
        tokenizer: tokenizer of the model, with its chat template.
        stop_ids: tokens that end a turn in the run, by which those of the chat template are known.
        data: how prompts are rendered; an opening of more than ``max_prompt_tokens`` fails its episode.
        in_rounds: see ``in_flight.TurnSource``.

    Raises:
        ConfigError: there is no such environment, or the chat template does not allow turns to be appended.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        in_rounds: bool,
    ) -> None:
        self.in_rounds = in_rounds
        self.limit_s = config.episode_timeout_s or math.inf
        self._config = config
        self._bridge = _bridge(config, data, tokenizer, stop_ids)
        self._vocab_size = len(tokenizer)
        self._finds_texts = not is_sentencepiece_only(Path(tokenizer.name_or_path))
        self.max_prompt_tokens = data.max_prompt_tokens
        self._states: dict[int, _EpisodeState] = {}
        self._pool = EnvironmentPool(
            config.name,
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            memory_limit_mib=config.memory_limit_mib,
            interface=config.endpoint_interface,
        )

    def open(self, episode: int, request: SampleRequest, *, stop_ids: Sequence[int]) -> None:
        """Calls ``reset`` with the problem's row; the stop tokens may be others than the run's, as in evaluations."""
        problem = request.problem
        if problem is None:
            raise RolloutError("a request for an episode has no problem that its environment could begin with")
        self._states[episode] = _EpisodeState(stop_ids=tuple(stop_ids))
        row: dict[str, Any] = {**json.loads(problem.columns_json), "prompt": problem.prompt}
        if problem.answer or row.get("answer") is None:  # else it is no text, such as a list of several
            row["answer"] = problem.answer
        self._pool.open(episode, row)

    def turn_ended(self, episode: int, completion: Any, *, is_asked: bool = True) -> None:
        """Calls ``step`` with the turn as a message, unless the environment is not asked."""
        state, token_ids = self._states[episode], tuple(completion.token_ids)
        is_cut = completion.finish_reason == "length"
        sampled = TurnStats(num_prompt_tokens=state.num_tokens, num_tokens=len(token_ids), is_cut=is_cut)
        state.num_branches += state.is_branch
        state.turns.append(_Turn(token_ids=token_ids, tools=state.tools, num_before=state.num_tokens))
        if state.has_ended or not is_asked:  # with its process, while the turn was sampled; the answer is there already
            return
        if state.writes_tokens:
            sampled = replace(sampled, token_ids=token_ids, logprobs=tuple(completion.logprobs.logprobs))
            self._pool.step(episode, Message(role="assistant", sampled=sampled))
        else:
            turn = self._bridge.parse(token_ids, is_truncated=is_cut, tools=state.tools, stop_ids=state.stop_ids)
            state.num_malformed += len(turn.malformed_calls)
            self._pool.step(episode, replace(turn, sampled=sampled))

    def answers(self, *, within_s: float) -> dict[int, TurnAnswer]:
        """Answers that there are, by episode."""
        found: dict[int, TurnAnswer] = {}
        for answer in self._pool.poll(within_s):
            state = self._states.get(answer.session)
            if state is None:  # forgotten meanwhile
                continue
            state.take(answer)
            try:
                if (following := self._answer(state, answer)) is not None:
                    found[answer.session] = following
            except DataError as error:  # the chat template refuses what the environment says
                found[answer.session] = TurnAnswer(context_ids=None, result=state.result(str(error)))
        return found

    def cut(self, episode: int) -> bool:
        """Calls ``get_reward`` if there is one; its answer ends the episode."""
        state = self._states[episode]
        if state.has_ended:  # with its process; that answer is there already
            return True
        if not (state.is_graded_anywhere and state.num_turns):
            return False
        self._pool.grade(episode)
        return True

    def late(self, episode: int) -> TurnAnswer:
        """Fails an episode, and ends its environment, whatever that does."""
        self._pool.end(episode)
        failure = (
            f"environment {self._config.name!r}: the episode took longer than {self.limit_s:g} s, the limit of "
            f"environment.episode_timeout_s"
        )
        return TurnAnswer(context_ids=None, result=self._states[episode].result(failure))

    def forget(self, episode: int) -> None:
        """Ends the environment of an episode."""
        if self._states.pop(episode, None) is not None:
            self._pool.end(episode)

    def close(self) -> None:
        """Ends the environments' processes."""
        self._pool.close()

    def _answer(self, state: _EpisodeState, answer: EpisodeAnswer) -> TurnAnswer | None:
        """What follows; None: another answer, which was asked for."""
        if answer.opening is not None:
            return self._opened(state, answer.opening)
        if answer.reply is not None:
            return self._replied(state, answer.reply, answer.session)
        return TurnAnswer(context_ids=None, result=state.result(answer.failure))

    def _opened(self, state: _EpisodeState, opening: Opening) -> TurnAnswer:
        state.tools, state.writes_tokens = opening.tools, bool(opening.token_ids)
        tokens = self._known(opening.token_ids) or self._bridge.opening(opening)
        if len(tokens) > self.max_prompt_tokens:
            failure = f"the opening has {len(tokens)} tokens, data.max_prompt_tokens={self.max_prompt_tokens}"
            return TurnAnswer(context_ids=None, result=state.result(failure))
        state.num_tokens = len(tokens)
        return TurnAnswer(context_ids=tokens, result=state.result(), stop=self._found_by_vllm(opening.stop))

    def _replied(self, state: _EpisodeState, reply: Reply, episode: int) -> TurnAnswer | None:
        reward = self._config.discount ** (state.num_turns - 1) * reply.reward
        if len(state.turn_rewards) < state.num_turns:
            state.turn_rewards.append(reward)
        else:  # of an episode that a limit has ended after its last turn was answered
            state.turn_rewards[-1] += reward
        state.reward += reward
        state.num_tool_errors += reply.num_tool_errors
        state.parts |= reply.parts
        if reply.done and state.is_ungraded:
            state.is_ungraded = False
        if not reply.done and state.num_turns >= self._config.max_turns and self.cut(episode):
            return None
        if reply.done or state.num_turns >= self._config.max_turns:
            return TurnAnswer(context_ids=None, result=state.result())
        return self._goes_on(state, reply)

    def _goes_on(self, state: _EpisodeState, reply: Reply) -> TurnAnswer:
        """What the policy reads next.

        Raises:
            DataError: it goes on from a turn that there is not, or the chat template refuses what is said.
        """
        number = state.num_turns - 1 if reply.after is None else reply.after
        if number >= state.num_turns:
            raise DataError(f"the reply is to turn {number} of {state.num_turns}, counted from 0")
        turn = state.turns[number]
        if reply.opening is not None:
            if bool(reply.opening.token_ids) != state.writes_tokens:
                kind = "token ids" if state.writes_tokens else "messages"
                raise DataError(f"the episode began with {kind}; its openings have {kind}")
            state.is_branch = True
            tokens = self._known(reply.opening.token_ids) or self._bridge.opening(reply.opening)
            state.tools, state.num_tokens = reply.opening.tools, len(tokens)
            stop = self._found_by_vllm(reply.opening.stop)
            return TurnAnswer(context_ids=tokens, result=state.result(), stop=stop, is_fresh=True)
        state.is_branch = reply.is_again or number != state.num_turns - 1
        stop, state.tools, state.num_tokens = self._found_by_vllm(reply.stop), turn.tools, turn.num_before
        if reply.is_again:
            return TurnAnswer(context_ids=(), result=state.result(), stop=stop, after=number, is_again=True)
        tokens = self._known(reply.token_ids) or self._bridge.next_turn(
            turn.token_ids, reply.messages, stop_ids=state.stop_ids
        )
        state.num_tokens += len(turn.token_ids) + len(tokens)
        return TurnAnswer(context_ids=tokens, result=state.result(), stop=stop, after=number)

    def _found_by_vllm(self, stop: tuple[str, ...]) -> tuple[str, ...]:
        """Texts that end a turn, where vLLM can find them."""
        if stop and not self._finds_texts:
            raise DataError(
                f"stop={shown(list(stop))}: vLLM cannot spell the tokens of a tokenizer that is sentencepiece's alone"
            )
        return stop

    def _known(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids that an environment has written, of which the model knows all."""
        if (largest := max(token_ids, default=0)) >= self._vocab_size:
            raise DataError(f"the environment wrote the token {largest}; the tokenizer has {self._vocab_size}")
        return token_ids


def check_conversation(
    config: EnvironmentConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int]
) -> None:
    """Checks what can be checked of an environment before anything starts.

    Raises:
        ConfigError: there is no such environment, or the chat template does not allow turns to be appended.
    """
    resolve_environment(config.name)
    _bridge(config, data, tokenizer, stop_ids)


def _bridge(
    config: EnvironmentConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> TemplateBridge:
    given = TemplateInputs(options=data.template_options, date=data.template_date or today())
    return TemplateBridge(tokenizer, stop_ids=stop_ids, given=given, form=config.call_form)
