"""One entropy a response: ``Hs[i]``, the mean of its tokens' [S 5; I 8], arithmetic or geometric [I App. C]."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_scale
from gtpo_megatron.algorithms.portable_math import portable_exp, portable_log
from gtpo_megatron.algorithms.rows import RowFacts, row_blocks


def sequence_entropy(
    weights: Tensor,
    averaged: Tensor,
    facts: RowFacts,
    *,
    is_geometric: bool,
    floor: float,
    clip: tuple[float, float] | None,
) -> Tensor:
    """``Hs = (1/|o|) sum_t H_t``, or ``exp((1/|o|) sum_t log H_t)``, with ``H`` clamped and raised by the floor.

    Sums are of integers, so padding does not touch a bit.

    Args:
        weights: ``[B, T]`` nats.
        averaged: ``[B, T]`` bool, the tokens that count.
        facts: of the rows.
        is_geometric: which mean.
        floor: added to every entropy; must be positive for geometric means of zeros.
        clip: entropies are clamped to it first.

    Returns:
        ``[B]`` float64 on the CPU; 0 for rows without tokens.
    """
    low, high = clip or (0.0, torch.finfo(torch.float64).max)
    smallest, largest = facts.lowest.clamp(low, high) + floor, facts.highest.clamp(low, high) + floor
    bound = largest
    if is_geometric:
        bound = torch.maximum(portable_log(smallest).abs(), portable_log(largest).abs())
    scale = grid_scale(bound * facts.lengths)
    means = torch.zeros(len(weights), dtype=torch.float64)
    row_scale = scale.to(weights.device)[:, None]
    for first, last in row_blocks(weights):
        live = averaged[first:last]
        block = torch.where(live, weights[first:last], 1.0).to(torch.float64).clamp_(low, high).add_(floor)
        block = torch.round((portable_log(block) if is_geometric else block) * row_scale[first:last])
        sums = (block * live).to(torch.int64).sum(1).to(torch.float64).cpu()
        count = live.sum(1).clamp(min=1).cpu()
        means[first:last] = sums / (scale[first:last] * count)
    means = portable_exp(means) if is_geometric else means
    return torch.where(facts.lengths > 0, means, 0.0)
