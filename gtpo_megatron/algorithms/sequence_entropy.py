"""One entropy a response: ``Hs[i]``, the mean of its tokens' [S 5; I 8], arithmetic or geometric [I App. C]."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_scale
from gtpo_megatron.algorithms.portable_math import LARGEST_LOG, portable_exp, portable_log
from gtpo_megatron.algorithms.rows import RowFacts, length_blocks
from gtpo_megatron.algorithms.scratch import Scratch


def sequence_entropy(
    weights: Tensor,
    response_mask: Tensor,
    facts: RowFacts,
    *,
    is_geometric: bool,
    floor: float,
    clip: tuple[float, float] | None,
    averaged: Tensor | None = None,
) -> Tensor:
    """``Hs = (1/|o|) sum_t H_t``, or ``exp((1/|o|) sum_t log H_t)``, with ``H`` clamped and raised by the floor.

    Sums are of integers, so padding does not touch a bit.

    Args:
        weights: ``[B, T]`` nats.
        response_mask: ``[B, T]`` bool.
        facts: of the rows.
        is_geometric: which mean.
        floor: added to every entropy; must be positive for geometric means of zeros.
        clip: entropies are clamped to it first.
        averaged: ``[B, T]`` bool, the response tokens that count; None: all.

    Returns:
        ``[B]`` float64 on the CPU; 0 for rows without tokens.
    """
    low, high = clip or (0.0, torch.finfo(torch.float64).max)
    largest = facts.highest.clamp(low, high) + floor
    scale = grid_scale((torch.full_like(largest, LARGEST_LOG) if is_geometric else largest) * facts.lengths)
    order, blocks = length_blocks(facts.lengths, weights)
    scratch = Scratch(weights.device)
    row_scale = scale[order].to(weights.device)[:, None]
    sums = torch.zeros(2, len(weights), dtype=torch.int64, device=weights.device)
    for block in blocks:
        grid = scratch.copy("grid", block.pick(weights, scratch, "picked"), torch.float64)
        block.clear_padding(grid, response_mask)
        grid.clamp_(low, high).add_(floor)
        if is_geometric:
            grid.copy_(portable_log(grid.clamp_(min=torch.finfo(torch.float64).tiny)))
        integers = scratch.copy("integers", grid.mul_(row_scale[block.part]).round_(), torch.int64)
        if averaged is not None:
            kept = averaged[:, : block.width].index_select(0, block.rows)
            integers.mul_(kept)
            sums[1, block.part] = kept.sum(1)
        elif block.full < block.width:  # the floor is not 0, and padding must be
            integers[:, block.full :].mul_(response_mask[:, block.full : block.width].index_select(0, block.rows))
        torch.sum(integers, 1, out=sums[0, block.part])
    by_row = torch.zeros(2, len(weights), dtype=torch.float64)
    by_row[:, order] = sums.cpu().to(torch.float64)
    count = facts.lengths if averaged is None else by_row[1]
    means = by_row[0] / (scale * count.clamp(min=1))
    means = portable_exp(means) if is_geometric else means
    return torch.where(facts.lengths > 0, means, 0.0)
