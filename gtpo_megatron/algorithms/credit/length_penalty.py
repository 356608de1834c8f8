"""Length penalties from lengths and raw outcomes."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.token_batch import ResponseTable
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    LengthPenaltyConfig,
    NoLengthPenalty,
    SoftOverlongPenalty,
)

ROUNDING = 1e-12
"""Tolerance of comparisons with a success rate: ``1 - 0.9`` is not exactly 0.1 in float64."""


def length_penalties(config: LengthPenaltyConfig, table: ResponseTable, is_cut: Tensor | None = None) -> Tensor:
    """``R(i)`` of every response of the batch.

    Args:
        config: the penalty.
        table: the responses.
        is_cut: ``[R]`` bool: a limit has cut the response, which is then as long as ``max_tokens`` at least. Of one
            turn it is that long anyway; in a conversation the limit is one of all tokens, lengths are of the policy's
            own. None: none was cut.

    Returns:
        ``[R]`` float64.
    """
    match config:
        case NoLengthPenalty():
            return torch.zeros_like(table.rewards)
        case SoftOverlongPenalty():
            lengths = table.lengths
            if is_cut is not None:
                lengths = torch.where(is_cut & table.is_live, lengths.clamp(min=config.max_tokens), lengths)
            penalty = soft_overlong(
                lengths,
                max_tokens=config.max_tokens,
                buffer_tokens=config.buffer_tokens,
                denominator_tokens=config.buffer_tokens if config.denominator == "l1" else config.max_tokens,
            )
            return penalty if config.applies_to == "all" else torch.where(table.is_correct, penalty, 0.0)
        case GroupRelativeLengthPenalty():
            return group_relative_overlong(
                table.lengths,
                table.is_correct,
                table.is_live,
                table.group_index,
                easy_threshold=config.easy_threshold,
                hard_penalty=length_penalties(config.hard_group_penalty, table, is_cut),
                ramps_incorrect=config.correct_minority == "incorrect",
            )


def soft_overlong(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, denominator_tokens: int) -> Tensor:
    """Linear ramp before the length limit [S sec. 4.5.1], DAPO's (arXiv 2503.14476, Eq. 13).

    ``L = L2 - L1``: 0 for ``|o| <= L``; ``(L - |o|) / denominator`` for ``L < |o| <= L2``; -1 beyond.

    Args:
        lengths: ``[R]`` int64, tokens.
        max_tokens: ``L2``.
        buffer_tokens: ``L1``.
        denominator_tokens: ``L1``, or ``L2`` for the paper's misprint.

    Returns:
        ``[R]`` float64 in [-1, 0].
    """
    start = max_tokens - buffer_tokens
    ramp = (start - lengths).to(torch.float64) / denominator_tokens
    return torch.where(lengths <= start, 0.0, torch.where(lengths <= max_tokens, ramp, -1.0))


def group_relative_overlong(
    lengths: Tensor,
    is_correct: Tensor,
    is_live: Tensor,
    group_index: Tensor,
    *,
    easy_threshold: float,
    hard_penalty: Tensor,
    ramps_incorrect: bool,
) -> Tensor:
    """Ramp that starts at a length taken from the group's own lengths [I App. D].

    Easy groups (``p = n/G >= gamma``): knee ``K = max((min + max) / 2, mean)`` of the correct lengths, ramp on correct
    responses. Hard groups (``p <= 1 - gamma``): ``hard_penalty``. Others: ``K`` of all lengths, ramp on correct
    responses if ``n > m``; the paper does not define ``n <= m``. The ramp: 0 below ``K``, ``-0.5 (|o| - K) / K`` up to
    ``2 K``, then -0.5.

    Args:
        lengths: ``[R]`` int64, tokens.
        is_correct: ``[R]`` bool.
        is_live: ``[R]`` bool; other rows are in no group.
        group_index: ``[R]`` int64.
        easy_threshold: ``gamma``.
        hard_penalty: ``[R]`` float64, the penalty in hard groups.
        ramps_incorrect: apply the ramp to incorrect responses of other groups with ``n <= m``, instead of no penalty.

    Returns:
        ``[R]`` float64 in [-0.5, 0] (hard groups aside).
    """
    penalty = torch.zeros(lengths.shape, dtype=torch.float64)
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    order = torch.argsort(group_index, stable=True)
    sizes = torch.bincount(group_index, minlength=num_groups).tolist()
    for members in torch.split(order, sizes):
        rows = members[is_live[members]]
        if not len(rows):
            continue
        correct, total = rows[is_correct[rows]], len(rows)
        rate = len(correct) / total
        if rate >= easy_threshold - ROUNDING:
            basis, penalised = correct, correct
        elif rate <= 1 - easy_threshold + ROUNDING:
            penalty[rows] = hard_penalty[rows]
            continue
        elif 2 * len(correct) > total:
            basis, penalised = rows, correct
        else:
            basis, penalised = rows, rows[~is_correct[rows]] if ramps_incorrect else rows[:0]
        penalty[penalised] = _ramp(lengths[penalised], _knee(lengths[basis]))
    return penalty


def _knee(lengths: Tensor) -> float:
    middle = (int(lengths.min()) + int(lengths.max())) / 2
    return max(middle, int(lengths.sum()) / len(lengths))


def _ramp(lengths: Tensor, knee: float) -> Tensor:
    return -0.5 * ((lengths.to(torch.float64) - knee) / knee).clamp(0.0, 1.0)
