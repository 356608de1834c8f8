"""Describes a mismatch in one phrase, by where its excess is."""

import math
from collections.abc import Mapping, Sequence

from gtpo_megatron.mismatch.gap_report import GapReport, Share, added

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
    by_engine = added([{engines[row]: share} for row, share in report.by_row.items()])
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
