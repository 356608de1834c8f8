"""From what vLLM returns to a `RolloutBatch`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest


def to_rollout_batch(
    requests: Sequence[SampleRequest],
    completions: Sequence[Any],
    *,
    entropies: Sequence[Sequence[float]] | None,
) -> RolloutBatch:
    """One row a request, in their order.

    Args:
        requests: what was asked for.
        completions: vLLM's ``CompletionOutput`` of each.
        entropies: of each sampled token, maybe one too many; None where nobody asked for them.

    Raises:
        RolloutError: a response has no tokens, too few log-probs or entropies, or tokens of which vLLM does not say
            which weights sampled them.
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
    )


def _logprobs(request: SampleRequest, tokens: list[int], completion: Any) -> list[float]:
    """Of the sampled tokens; vLLM's flat form holds one entry a position, since no runners-up were asked for."""
    flat = completion.logprobs
    if completion.finish_reason not in ("stop", "length") or not tokens or flat is None or flat.token_ids != tokens:
        raise RolloutError(
            f"{_name(request)}: {len(tokens)} tokens, finish reason {completion.finish_reason!r}, "
            f"{0 if flat is None else len(flat.token_ids)} log-probs"
        )
    logprobs: list[float] = flat.logprobs
    return logprobs


def _versions(request: SampleRequest, tokens: list[int], completion: Any) -> list[int]:
    """Of the weights that sampled each token; vLLM labels spans of tokens with what ``set_weight_version`` was told."""
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
