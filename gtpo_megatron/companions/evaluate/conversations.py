"""Conversations with an environment as a stream of responses that are graded already, for an evaluation."""

import json
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtpo_megatron.batch import ENVIRONMENT_SECONDS, ENVIRONMENT_WAIT, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.stages.environment_rewards import episode_rewards
from gtpo_megatron.rewards.request import Verdict
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.response_stream import QUEUE_FACTOR, SampledResponse

if TYPE_CHECKING:
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

ADVANCE_S = 0.5
"""Seconds after which ended episodes are taken, and others begun in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedResponse(SampledResponse):
    """An episode that has ended; its tokens are all that followed the prompt, whoever wrote them.

    Attributes:
        num_own_tokens: tokens that the policy wrote.
        verdict: reward of the environment.
    """

    num_own_tokens: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSource:
    """The engine of an evaluation with an environment, as a source of responses.

    Attributes:
        engine: the engine, with the environment.
        max_concurrent: sequences that vLLM decodes together.
    """

    engine: "VllmEngine"
    max_concurrent: int

    def stream(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int
    ) -> Iterator[PlayedResponse]:
        """Yields episodes as they end; requests enter in order, a window at a time.

        Closing the iterator ends the episodes under way.

        Raises:
            RolloutError: as ``VllmEngine.generate``.
        """
        waiting = deque(enumerate(requests))
        inside: dict[Hashable, int] = {}  # ticket of an episode -> index of its request
        try:
            while waiting or inside:
                while waiting and len(inside) < QUEUE_FACTOR * self.max_concurrent:
                    index, request = waiting.popleft()
                    inside[self.engine.begin([request], sampling, seed=seed)] = index
                for ticket in self.engine.advance(limit_s=ADVANCE_S):
                    index = inside.pop(ticket)
                    yield _played(index, self.engine.take(ticket))
        finally:
            for ticket in inside:
                self.engine.abort(ticket)


def _played(index: int, episode: RolloutBatch) -> PlayedResponse:
    """A batch of one response."""
    (result,) = episode.results
    rewards = episode_rewards(episode.results)  # in float32, as training has them
    is_refused = bool(result.refusal) and result.refusal not in result.failure
    return PlayedResponse(
        index=index,
        token_ids=tuple(episode.response_ids[0, : int(episode.response_lengths)].tolist()),
        is_truncated=bool(episode.truncated),
        num_own_tokens=int(episode.own_lengths),
        verdict=Verdict(
            kind="error" if result.failure else "ok",
            reward=float(rewards.rewards),
            parts={
                name: float(part)
                for name, part in rewards.parts.items()
                if name not in (ENVIRONMENT_SECONDS, ENVIRONMENT_WAIT)  # in which two evaluations differ
            },
            info=json.dumps({"refused": result.refusal}, ensure_ascii=False) if is_refused else "",
            failure=result.failure or None,
        ),
    )
