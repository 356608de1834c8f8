"""Clip-Cov and KL-Cov: tokens of high covariance between log-prob and advantage (arXiv 2505.22617)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.hashing import content_seeds, token_hashes
from gtpo_megatron.algorithms.losses.clipped_surrogate import token_surrogate
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.selection import largest, num_selected, ordered_integers
from gtpo_megatron.algorithms.sums import exact_sum
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm import ClipCovConfig, KLCovConfig


def token_covariance(batch: CreditBatch, advantages: Tensor) -> Tensor:
    """``(log pi_old - mean(log pi_old)) (A - mean(A))``, means over all tokens of the batch, ``[N]`` float64 (Eq. 10).

    Collectives: a ``max`` and a ``sum`` of one number, twice.
    """
    assert batch.old_logprobs is not None
    count = batch.table.lengths.sum()[None].to(advantages.device)
    key = torch.zeros_like(batch.row)
    product = torch.ones_like(advantages)
    for values in (batch.old_logprobs, advantages):
        product *= values - exact_sum(values, key, count, batch.reduction).mean
    return product


def select_clip_cov(config: ClipCovConfig, batch: CreditBatch, advantages: Tensor) -> Tensor:
    """``clip_fraction`` of the batch's tokens, drawn at random from those with a covariance in [cov_low, cov_high]."""
    covariance = token_covariance(batch, advantages)
    candidates = (covariance >= config.cov_low) & (covariance <= config.cov_high)
    assert batch.old_logprobs is not None
    bits = batch.old_logprobs.to(torch.float32).view(torch.int32)
    seeds = content_seeds(bits, batch.row, len(batch.lengths), config.seed)
    keys = token_hashes(seeds.index_select(0, batch.row), batch.place) >> 31
    return largest(keys, candidates, num_selected(batch, config.clip_fraction), batch.reduction)


def select_kl_cov(config: KLCovConfig, batch: CreditBatch, advantages: Tensor) -> Tensor:
    """The ``penalised_fraction`` of the batch's tokens with the highest covariance."""
    keys = ordered_integers(token_covariance(batch, advantages))
    return largest(
        keys, torch.ones_like(keys, dtype=torch.bool), num_selected(batch, config.penalised_fraction), batch.reduction
    )


def clip_cov_loss(config: ClipCovConfig, inputs: LossInputs) -> Tensor:
    """The clipped surrogate; selected tokens have no loss and so no gradient (Eq. 11-12)."""
    assert inputs.selection is not None
    return torch.where(inputs.selection, 0.0, token_surrogate(config, inputs))


def kl_cov_loss(config: KLCovConfig, inputs: LossInputs) -> Tensor:
    """``-w A``, plus ``kl_coef |log w|`` on the selected tokens (Eq. 13, as its authors coded it).

    The derivative of ``|.|`` at 0 is 0, so the penalty has no gradient in the first update of a rollout batch.
    """
    assert inputs.selection is not None
    penalty = config.kl_coef * inputs.log_ratios.abs() * inputs.selection
    return -inputs.ratio * inputs.advantages + penalty
