"""Converts vLLM's results to a `RolloutBatch`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.routing import expert_dtype
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest


def to_rollout_batch(
    requests: Sequence[SampleRequest],
    completions: Sequence[Any],
    *,
    entropies: Sequence[Sequence[float]] | None,
    routing: Sequence[Tensor] | None = None,
) -> RolloutBatch:
    """Builds a batch with one row per request, in order.

    Args:
        requests: the requests.
        completions: vLLM's ``CompletionOutput`` of each.
        entropies: of each sampled token, possibly one too many; None if not requested.
        routing: per response the experts of the tokens that were run; None if not requested.

    Raises:
        RolloutError: a response has no tokens, too few log-probs or entropies, or tokens without a weight version.
    """
    ids = [list(completion.token_ids) for completion in completions]
    logprobs = [
        _logprobs(request, tokens, completion)
        for request, tokens, completion in zip(requests, ids, completions, strict=True)
    ]
    versions = [
        _versions(request, tokens, completion)
        for request, tokens, completion in zip(requests, ids, completions, strict=True)
    ]
    found = {version for row in versions for version in row}
    entropy = None
    if entropies is not None:
        for request, tokens, values in zip(requests, ids, entropies, strict=True):
            if len(values) < len(tokens):
                raise RolloutError(f"{_name(request)}: {len(tokens)} tokens but {len(values)} entropies")
        entropy = _padded([values[: len(tokens)] for tokens, values in zip(ids, entropies, strict=True)])
    return RolloutBatch(
        prompt_ids=_padded([request.prompt_ids for request in requests], torch.int64),
        prompt_lengths=torch.tensor([len(request.prompt_ids) for request in requests]),
        response_ids=_padded(ids, torch.int64),
        response_lengths=torch.tensor([len(tokens) for tokens in ids]),
        loss_mask=_padded([[True] * len(tokens) for tokens in ids], torch.bool),
        rollout_logprobs=_padded(logprobs),
        group_ids=torch.tensor([request.group_id for request in requests]),
        truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
        policy_version=min(found),
        token_entropy=entropy,
        token_versions=_padded(versions, torch.int64) if len(found) > 1 else None,
        routed_experts=torch.cat(list(routing)) if routing is not None else None,
    )


def returned_routing(request: SampleRequest, completion: Any, num_tokens: int, *, num_experts: int) -> Tensor:
    """The experts that vLLM itself returns with a response.

    Args:
        request: what was asked for.
        completion: vLLM's ``CompletionOutput``.
        num_tokens: that were run.
        num_experts: of a router.

    Returns:
        ``[num_tokens, M, k]`` uint8 or int16.

    Raises:
        RolloutError: vLLM returned none, or of too few tokens.
    """
    found = completion.routed_experts
    if found is None or len(found) < num_tokens:
        raise RolloutError(
            f"{_name(request)}: routing of {0 if found is None else len(found)} of {num_tokens} tokens came with it"
        )
    return torch.from_numpy(found[:num_tokens].astype("int32")).to(expert_dtype(num_experts))


def _logprobs(request: SampleRequest, tokens: list[int], completion: Any) -> list[float]:
    """Log-probs of the sampled tokens; vLLM's flat form has one entry per position here."""
    flat = completion.logprobs
    if completion.finish_reason not in ("stop", "length") or not tokens or flat is None or flat.token_ids != tokens:
        raise RolloutError(
            f"{_name(request)}: {len(tokens)} tokens, finish reason {completion.finish_reason!r}, "
            f"{0 if flat is None else len(flat.token_ids)} log-probs"
        )
    logprobs: list[float] = flat.logprobs
    return logprobs


def _versions(request: SampleRequest, tokens: list[int], completion: Any) -> list[int]:
    """Policy version of each token; vLLM labels spans of tokens with the version of ``set_weight_version``."""
    spans = completion.weight_versions or []
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    if len(versions) != len(tokens):
        raise RolloutError(f"{_name(request)}: {len(tokens)} tokens, {len(versions)} of them with a policy version")
    return versions


def _name(request: SampleRequest) -> str:
    return f"response {request.sample} of group {request.group_id}"


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    out = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
