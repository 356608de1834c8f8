"""vLLM's ``/inference/v1/generate``, for agents that make the tokens themselves: ids in, ids and log-probs out."""

from dataclasses import dataclass
from typing import Any

from gtpo_megatron.conversations.chat_form import WHERE, stop_from, usage_of
from gtpo_megatron.conversations.exchange import Asked
from gtpo_megatron.conversations.messages import Message, Opening, TurnStats
from gtpo_megatron.conversations.openai_form import token_ids_from
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

_KEYS = frozenset(
    {
        *("token_ids", "sampling_params", "request_id", "stream", "output_mode"),
        *("model", "cache_salt", "priority", "return_token_ids"),  # which change nothing here
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest:
    """A request for a turn of the policy.

    Attributes:
        asked: all tokens, and the texts that end the turn.
        request_id: id that the client gave the request; "": none.
    """

    asked: Asked
    request_id: str


def token_request_from(value: object) -> TokenRequest:
    """A request from its JSON.

    Raises:
        DataError: it is none, or asks for what an episode cannot have.
    """
    body = Fields({key: one for key, one in Fields(value, WHERE).raw.items() if one is not None}, WHERE)
    for key, given in body.raw.items():
        if key not in _KEYS:
            raise DataError(f"{key}={shown(given)}: this endpoint does not know it")
    sampling = body.fields("sampling_params")
    wanted = {"stream": (body, False), "output_mode": (body, "tokens"), "n": (sampling, 1)}
    for key, (fields, only) in wanted.items():
        if fields.has(key) and fields.raw[key] != only:
            raise DataError(f"{key}={shown(fields.raw[key])}: only {only!r} is possible here")
    token_ids = token_ids_from(body.raw.get("token_ids"), f"{WHERE}: token_ids")
    if not token_ids:
        raise DataError("token_ids=[]: expected at least one")
    opening = Opening(token_ids=token_ids, stop=stop_from(sampling.raw.get("stop"), WHERE))
    return TokenRequest(asked=Asked(opening=opening), request_id=body.get("request_id", str, ""))


def token_answer(turn: Message, *, request: TokenRequest, number: int) -> dict[str, Any]:
    """The answer to a request; token ids are spelt as vLLM does in text and as numbers, since clients read either."""
    sampled = turn.sampled or TurnStats()
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": sampled.token_ids,
        "finish_reason": "length" if sampled.is_cut else "stop",
        "stop_reason": None,
        "logprobs": {"content": content},
    }
    return {"request_id": request.request_id or f"generate-{number}", "choices": [choice], "usage": usage_of(turn)}
