"""Converts what vLLM sampled to a `RolloutBatch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import ENVIRONMENT_WAIT, EpisodeResult, RolloutBatch
from gtpo_megatron.branches import NOTHING, Branch
from gtpo_megatron.data.routing import expert_dtype
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.in_flight import SampledEpisode
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.experts import Experts


def to_rollout_batch(
    episodes: Sequence[SampledEpisode],
    *,
    version: int,
    entropies: Mapping[int, Sequence[float]] | None,
    routing: Sequence[Tensor] | None = None,
) -> RolloutBatch:
    """Builds a batch with one row per episode, in order.

    Args:
        episodes: all ended.
        version: policy version of a batch without a token.
        entropies: by vLLM's number of a turn, those of its sampled tokens, possibly one too many; None if not
            requested.
        routing: per response the experts of the tokens that were run; None if not requested.

    Raises:
        RolloutError: a turn has no tokens, too few log-probs or entropies, or tokens without a weight version.
    """
    rows = [_row(episode, entropies) for episode in episodes]
    found = {version for row in rows for version, is_own in zip(row.versions, row.is_own, strict=True) if is_own}
    return RolloutBatch(
        prompt_ids=_padded([episode.prompt_ids for episode in episodes], torch.int64),
        prompt_lengths=torch.tensor([len(episode.prompt_ids) for episode in episodes]),
        response_ids=_padded([row.token_ids for row in rows], torch.int64),
        response_lengths=torch.tensor([len(row.token_ids) for row in rows]),
        loss_mask=_padded([row.is_own for row in rows], torch.bool),
        rollout_logprobs=_padded([row.logprobs for row in rows]),
        group_ids=torch.tensor([episode.request.group_id for episode in episodes]),
        truncated=torch.tensor([_is_truncated(episode) for episode in episodes]),
        policy_version=min(found, default=version),
        token_entropy=_padded([row.entropies for row in rows]) if entropies is not None else None,
        token_versions=_padded([row.versions for row in rows], torch.int64) if len(found) > 1 else None,
        routed_experts=torch.cat(list(routing)) if routing is not None else None,
        branches=tuple(tuple(row.branches) for row in rows) if any(row.branches for row in rows) else (),
        results=tuple(_result(episode) for episode in episodes if episode.result is not None),
    )


@dataclass(slots=True)
class _ResponseRow:
    """The tokens of a response, one value each, and where they do not follow those before them."""

    token_ids: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)


def _row(episode: SampledEpisode, entropies: Mapping[int, Sequence[float]] | None) -> _ResponseRow:
    row, request = _ResponseRow(), episode.request
    begins: list[int] = []  # by turn, the place after whose token it was sampled, and below that of its end
    ends: list[int] = []
    for index, turn in enumerate(episode.turns):
        tokens = list(turn.completion.token_ids)
        logprobs = _logprobs(request, tokens, turn.completion)
        versions = _versions(request, tokens, turn.completion)
        values = [0.0] * len(tokens) if entropies is None else list(entropies[turn.number])
        if len(values) < len(tokens):
            raise RolloutError(f"{_name(request)}: {len(tokens)} tokens but {len(values)} entropies")
        at, context = len(row.token_ids), list(turn.context_ids)
        if index == 0:
            follows, context = 0, []  # the prompt
        elif turn.again is not None:
            follows, context = begins[turn.again], []  # it is in the row
        else:
            follows = NOTHING if turn.after is None else ends[turn.after]
        if follows != at:
            row.branches.append(Branch(at, follows))
        begins.append(at + len(context) if context else follows)
        ends.append(at + len(context) + len(tokens))
        row.token_ids += context + tokens
        row.is_own += [False] * len(context) + [True] * len(tokens)
        row.logprobs += [0.0] * len(context) + logprobs
        row.versions += [versions[0]] * len(context) + versions
        row.entropies += [0.0] * len(context) + values[: len(tokens)]
    return row


def _is_truncated(episode: SampledEpisode) -> bool:
    if episode.is_cut:
        return True
    # an environment may go on after a turn that was cut
    followed = {turn.after for turn in episode.turns}
    ends = [turn for number, turn in enumerate(episode.turns) if number not in followed]
    return any(turn.completion.finish_reason == "length" for turn in ends)


def _result(episode: SampledEpisode) -> EpisodeResult:
    """The environment's account, with the time in which the engine waited."""
    assert episode.result is not None
    return replace(episode.result, parts={**episode.result.parts, ENVIRONMENT_WAIT: episode.idle_s})


def returned_routing(request: SampleRequest, completion: Any, num_tokens: int, *, experts: Experts) -> Tensor:
    """The experts that vLLM itself returns with a response, which has zeros for layers without a router.

    Args:
        request: what was asked for.
        completion: vLLM's ``CompletionOutput``.
        num_tokens: that were run.
        experts: experts of the model.

    Returns:
        ``[num_tokens, M, k]`` uint8 or int16, of the ``M`` layers that have a router.

    Raises:
        RolloutError: vLLM returned none, or of too few tokens, or of another number of layers.
    """
    found = completion.routed_experts
    if found is None or len(found) < num_tokens:
        raise RolloutError(
            f"{_name(request)}: routing of {0 if found is None else len(found)} of {num_tokens} tokens came with it"
        )
    if found.shape[1] != len(experts.layers):
        raise RolloutError(
            f"{_name(request)}: routing of {found.shape[1]} layers came with it, the model's config.json says "
            f"{len(experts.layers)}; switch rollout.returns_routing off, and replay with update.routing_replay='score'"
        )
    chosen = found[:num_tokens, list(experts.layers)]
    return torch.from_numpy(chosen.astype("int32")).to(expert_dtype(experts.num_experts))


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
