"""Where the gaps of a step are, rank by rank, and what that looks like: the message when a run stops."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch

NUM_WORST = 20
"""Tokens that are written down."""

CONTEXT_BEFORE, CONTEXT_AFTER = 16, 8
"""Tokens on both sides of such a token, prompt included."""

NOT_FINITE_NATS = 1e3
"""What a gap counts as if it is NaN or infinite, so that it comes first and sums stay finite."""

Share = tuple[int, float]
"""Number of tokens, and the sum of their excess in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GapToken:
    """A token with a large gap.

    Attributes:
        row: row of the response in the whole batch.
        group_id: label of its prompt.
        position: place in the response, from 0.
        token_id: the token.
        sampler_logprob: nats.
        trainer_logprob: nats.
        policy_version: version of the sampler's weights.
        prompt_length: tokens.
        response_length: tokens.
        before: tokens before it, of prompt and response, the nearest last.
        after: tokens after it.
    """

    row: int
    group_id: int
    position: int
    token_id: int
    sampler_logprob: float
    trainer_logprob: float
    policy_version: int
    prompt_length: int
    response_length: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def gap(self) -> float:
        """Absolute difference of the log-probs, nats."""
        return _counted(torch.tensor(self.trainer_logprob - self.sampler_logprob, dtype=torch.float64)).item()


@dataclass(frozen=True, kw_only=True, slots=True)
class GapReport:
    """Gaps of some responses, summed by what they may have in common.

    The excess of a token is what its gap is above the typical one.

    Attributes:
        worst: tokens with the largest gaps, largest first.
        by_row: gaps of the tokens of each response, by its row in the whole batch.
        by_position: gaps per range of positions ``[2^k - 1, 2^(k+1) - 1)``, by ``k``.
        by_token: gaps by token id.
        by_length: gaps per range of sequence lengths (prompt and response) ``[2^k, 2^(k+1))``, by ``k``.
        excess_below: part of the excess of tokens that the trainer finds less likely than the sampler does.
    """

    worst: tuple[GapToken, ...]
    by_row: Mapping[int, Share]
    by_position: Mapping[int, Share]
    by_token: Mapping[int, Share]
    by_length: Mapping[int, Share]
    excess_below: float


def gap_report(
    rollouts: RolloutBatch, trainer_logprobs: Tensor, *, rows: Sequence[int], typical_nats: float
) -> GapReport:
    """Reports on this rank's responses.

    Args:
        rollouts: the responses, with the sampler's log-probs.
        trainer_logprobs: ``[B, T]`` nats.
        rows: rows of the responses in the whole batch.
        typical_nats: gap up to which a token has no excess.

    Communication: none.
    """
    mask = rollouts.loss_mask
    place, position = mask.nonzero(as_tuple=True)
    difference = (trainer_logprobs.double() - rollouts.rollout_logprobs.double())[mask]
    gap = _counted(difference)
    excess = (gap - typical_nats).clamp(min=0.0)
    order = gap.argsort(descending=True, stable=True)[:NUM_WORST]
    length = rollouts.prompt_lengths + rollouts.response_lengths
    return GapReport(
        worst=tuple(
            _token(rollouts, trainer_logprobs, int(place[index]), int(position[index]), rows=rows)
            for index in order.tolist()
        ),
        by_row=_shares(torch.tensor(list(rows), dtype=torch.int64)[place], excess),
        by_position=_shares(_octave(position + 1), excess),
        by_token=_shares(rollouts.response_ids[mask], excess),
        by_length=_shares(_octave(length[place]), excess),
        excess_below=float(excess[~(difference >= 0)].sum()),
    )


def merge_gaps(reports: Sequence[GapReport]) -> GapReport:
    """The report on all responses of several ranks."""
    worst = sorted(
        (token for report in reports for token in report.worst),
        key=lambda token: (-token.gap, token.row, token.position),
    )
    return GapReport(
        worst=tuple(worst[:NUM_WORST]),
        by_row=add_shares([report.by_row for report in reports]),
        by_position=add_shares([report.by_position for report in reports]),
        by_token=add_shares([report.by_token for report in reports]),
        by_length=add_shares([report.by_length for report in reports]),
        excess_below=sum(report.excess_below for report in reports),
    )


def add_shares(parts: Sequence[Mapping[int, Share]]) -> dict[int, Share]:
    """Sums of numbers and excess by key, in the order of the keys."""
    totals: defaultdict[int, Share] = defaultdict(lambda: (0, 0.0))
    for part in parts:
        for key, (number, excess) in part.items():
            before = totals[key]
            totals[key] = (before[0] + number, before[1] + excess)
    return dict(sorted(totals.items()))


def _counted(difference: Tensor) -> Tensor:
    return difference.abs().nan_to_num(nan=NOT_FINITE_NATS, posinf=NOT_FINITE_NATS).clamp(max=NOT_FINITE_NATS)


def _octave(values: Tensor) -> Tensor:
    """``floor(log2(v))`` of integers from 1."""
    return torch.frexp(values.double())[1].long() - 1


def _shares(keys: Tensor, excess: Tensor) -> dict[int, Share]:
    found, index = torch.unique(keys, return_inverse=True)
    numbers = torch.zeros(len(found), dtype=torch.int64).index_add_(0, index, torch.ones_like(index))
    sums = torch.zeros(len(found), dtype=torch.float64).index_add_(0, index, excess)
    return {
        key: (number, total) for key, number, total in zip(found.tolist(), numbers.tolist(), sums.tolist(), strict=True)
    }


def _token(
    rollouts: RolloutBatch, trainer_logprobs: Tensor, place: int, position: int, *, rows: Sequence[int]
) -> GapToken:
    prompt_length, response_length = int(rollouts.prompt_lengths[place]), int(rollouts.response_lengths[place])
    response = rollouts.response_ids[place, :response_length].tolist()
    path = next(path for path in rollouts.paths(place) if any(a <= position < b for a, b in path.new_stretches))
    on_path = [one for first, last in path.stretches for one in range(first, last) if one < position]
    before = rollouts.prompt_ids[place, : prompt_length * path.has_prompt].tolist() + [response[one] for one in on_path]
    versions = rollouts.token_versions
    return GapToken(
        row=rows[place],
        group_id=int(rollouts.group_ids[place]),
        position=position,
        token_id=response[position],
        sampler_logprob=float(rollouts.rollout_logprobs[place, position]),
        trainer_logprob=float(trainer_logprobs[place, position]),
        policy_version=rollouts.policy_version if versions is None else int(versions[place, position]),
        prompt_length=prompt_length,
        response_length=response_length,
        before=tuple(before[-CONTEXT_BEFORE:]),
        after=tuple(response[position + 1 : position + 1 + CONTEXT_AFTER]),
    )


MOST = 0.8
"""Share of the excess that a part of the tokens must have to be named."""

FEW = 0.5
"""Largest share of the tokens that such a part may be: what is true of most tokens says nothing."""

FEW_TOKEN_IDS = 0.2
"""The same for token ids, of which every text has some that are frequent."""

SHOWN_TOKEN_IDS = 5


def looks_like(report: GapReport, *, engines: Sequence[int]) -> str:
    """The first of these that the report supports: one engine, some token ids, positions, lengths; else all tokens.

    Args:
        report: on all responses of the step.
        engines: per response of the batch the engine that sampled it.
    """
    total = sum(excess for _, excess in report.by_row.values())
    num_tokens = sum(number for number, _ in report.by_row.values())
    if total <= 0 or num_tokens == 0:
        return "every token differs a little, none stands out"
    parts = (
        _engine(report, engines),
        _token_ids(report.by_token, total, num_tokens),
        _range(report.by_position, total, num_tokens, offset=1, what="positions", of="of the responses"),
        _range(report.by_length, total, num_tokens, offset=0, what="sequences of", of="tokens"),
    )
    found = next((part for part in parts if part), "tokens of all kinds, at all positions")
    below = report.excess_below / total
    if below > MOST:
        return f"{found}; the trainer finds them less likely than the sampler did"
    return f"{found}; the trainer finds them more likely than the sampler did" if below < 1 - MOST else found


def _engine(report: GapReport, engines: Sequence[int]) -> str:
    if len(set(engines)) < 2:
        return ""
    by_engine = add_shares([{engines[row]: share} for row, share in report.by_row.items()])
    engine, (number, excess) = max(by_engine.items(), key=lambda item: item[1][1])
    total, num_tokens = _sums(by_engine)
    # of two engines, one has about half of the tokens
    if excess < MOST * total or number > (FEW + 1) / 2 * num_tokens:
        return ""
    return f"the tokens of engine {engine}, one of {len(by_engine)}"


def _token_ids(by_token: Mapping[int, Share], total: float, num_tokens: int) -> str:
    ranked = sorted(by_token.items(), key=lambda item: (-item[1][1], item[0]))
    chosen: list[int] = []
    number, excess = 0, 0.0
    for token, (count, own) in ranked:
        chosen, number, excess = [*chosen, token], number + count, excess + own
        if excess >= MOST * total:
            break
    # a few tokens are always of few ids; a fault of an id meets it more than once
    if number > FEW_TOKEN_IDS * num_tokens or number < 2 * len(chosen):
        return ""
    shown = ", ".join(map(str, chosen[:SHOWN_TOKEN_IDS])) + (", ..." if len(chosen) > SHOWN_TOKEN_IDS else "")
    return f"some token ids: {len(chosen)} of {len(by_token)} ({shown})"


def _range(by_octave: Mapping[int, Share], total: float, num_tokens: int, *, offset: int, what: str, of: str) -> str:
    """The shortest run of neighbouring ranges with most of the excess, if few tokens are in it."""
    keys = sorted(by_octave)
    runs = [keys[first:last] for first in range(len(keys)) for last in range(first + 1, len(keys) + 1)]
    fitting = [run for run in runs if sum(by_octave[key][1] for key in run) >= MOST * total]
    run = min(fitting, key=lambda run: sum(by_octave[key][0] for key in run))
    if sum(by_octave[key][0] for key in run) > FEW * num_tokens:
        return ""
    low, high = 2 ** run[0] - offset, 2 ** (run[-1] + 1) - offset - 1
    return f"{what} {low} to {high} {of}" if run[-1] != keys[-1] else f"{what} {low} and more {of}"


def _sums(shares: Mapping[int, Share]) -> tuple[float, int]:
    return math.fsum(excess for _, excess in shares.values()), sum(number for number, _ in shares.values())
