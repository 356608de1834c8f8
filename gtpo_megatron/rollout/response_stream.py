"""A stream of responses in the order in which they end, for evaluation."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest

QUEUE_FACTOR = 2
"""Requests inside vLLM, as a multiple of the sequences that it decodes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledResponse:
    """One complete response.

    Attributes:
        index: index of its request.
        token_ids: its tokens, including the one that ended it.
        is_truncated: whether the length limit cut it.
    """

    index: int
    token_ids: tuple[int, ...]
    is_truncated: bool


def stream_responses(
    engine: Any,
    add: Callable[[SampleRequest], int],
    requests: Sequence[SampleRequest],
    *,
    max_concurrent: int,
) -> Iterator[SampledResponse]:
    """Keeps an ``LLMEngine`` busy until every request has ended; yields responses as they end.

    Requests enter in order, a window at a time, so that earlier problems end earlier.

    Args:
        engine: vLLM's engine.
        add: adds a request to it and returns its number.
        requests: all requests.
        max_concurrent: sequences that vLLM decodes together.

    Raises:
        RolloutError: vLLM ended a request without a token, or lost one.
    """
    waiting = deque(enumerate(requests))
    inside: dict[str, int] = {}  # vLLM's number of a request -> its index
    try:
        while waiting or inside:
            while waiting and len(inside) < QUEUE_FACTOR * max_concurrent:
                index, request = waiting.popleft()
                inside[str(add(request))] = index
            if not engine.has_unfinished_requests():
                raise RolloutError(f"vLLM lost {len(inside)} requests: none is unfinished, but they did not come back")
            for output in engine.step():
                if output.finished:
                    yield _ended(inside.pop(output.request_id), output.outputs[0])
    finally:
        if inside:
            engine.abort_request(list(inside))


def _ended(index: int, completion: Any) -> SampledResponse:
    if not completion.token_ids:
        raise RolloutError(f"request {index} ended without a token: finish reason {completion.finish_reason!r}")
    return SampledResponse(
        index=index, token_ids=tuple(completion.token_ids), is_truncated=completion.finish_reason == "length"
    )
