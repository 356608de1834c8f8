"""STARE: other weights for surprising tokens while entropy is low (arXiv 2606.19236, Algorithm 1)."""

import math
from dataclasses import replace
from fractions import Fraction

import torch

from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.losses.selection import largest, ordered_integers
from gtpo_megatron.algorithms.sums import exact_sum
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import STAREConfig
from gtpo_megatron.errors import ShapeError


def stare_credit(config: STAREConfig, batch: CreditBatch) -> Credit:
    """``omega A``, ``A`` being GRPO's; ``omega > 0``, so this equals a weight on the clipped objective.

    If the mean entropy of the batch's tokens is below ``entropy_target``, ``omega`` is ``positive_weight`` on the most
    surprising tokens with ``A > 0`` and, in variant C2, ``negative_weight`` on those with ``A < 0``; 1 elsewhere.
    The most surprising tokens are the ``ceil(top_fraction n)`` of the ``n`` tokens of that sign with the greatest
    ``-log pi_old``, and their ties.

    Collectives: a ``max`` and a ``sum`` of one number, a ``sum`` of two; for each weighted sign three ``sum`` of 2,048
    counts.
    """
    credit = group_relative_credit(config, batch)
    if _mean_entropy(batch) >= config.entropy_target or batch.old_logprobs is None:
        return credit
    surprisal = ordered_integers(-batch.old_logprobs)
    weight = torch.ones_like(credit.advantages)
    sides = [(credit.advantages > 0, config.positive_weight)]
    if config.variant == "C2":
        sides.append((credit.advantages < 0, config.negative_weight))
    sizes = batch.reduction.sum(torch.stack([side.sum() for side, _ in sides])).tolist()
    for (side, side_weight), size in zip(sides, sizes, strict=True):
        weight[largest(surprisal, side, _num_surprising(config.top_fraction, size), batch.reduction)] = side_weight
    return replace(credit, advantages=credit.advantages * weight)


def check_surprisal(config: STAREConfig, batch: CreditBatch) -> None:  # noqa: ARG001 - the signature of a check
    """Checks that log-probs were given.

    Raises:
        ShapeError: they were not.
    """
    if batch.old_logprobs is None:
        raise ShapeError("old_logprobs: got None, needed for STAREConfig")


def _mean_entropy(batch: CreditBatch) -> float:
    count = batch.table.lengths.sum()[None].to(batch.entropy.device)
    return float(exact_sum(batch.entropy, torch.zeros_like(batch.row), count, batch.reduction).mean)


def _num_surprising(fraction: float, size: int) -> int:
    """``ceil(fraction * size)`` with ``fraction`` as a decimal number: 0.1 of 30 is 3, not 4."""
    return math.ceil(Fraction(str(fraction)) * size)
