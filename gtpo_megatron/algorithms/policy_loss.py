"""The facade of losses: from current log-probs to sums and weights, by the type of the configuration."""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_config,
    check_full_precision,
    check_labels,
    check_mask,
    check_rank,
    check_shape,
)
from gtpo_megatron.algorithms.cispo import cispo_loss
from gtpo_megatron.algorithms.clipped_surrogate import clip_statistics, clipped_surrogate
from gtpo_megatron.algorithms.covariance import kl_cov_loss
from gtpo_megatron.algorithms.denominators import Denominator, row_weights
from gtpo_megatron.algorithms.loss_terms import BatchTerms, LossTerms, sum_count
from gtpo_megatron.algorithms.ratios import log_ratio, sequence_ratio
from gtpo_megatron.algorithms.rows import check_finite, left_aligned_lengths
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    ClipSettings,
    DAPOConfig,
    DrGRPOConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    TopEntropyConfig,
)
from gtpo_megatron.errors import ShapeError

TokenLossConfig: TypeAlias = (
    GTPOConfig
    | GRPOConfig
    | DAPOConfig
    | DrGRPOConfig
    | CISPOConfig
    | EntropyAdvantageConfig
    | TopEntropyConfig
    | ClipCovConfig
    | KLCovConfig
)
"""Algorithms with one ratio a token."""


def policy_loss(
    config: AlgorithmConfig,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    group_ids: Tensor | None = None,
    batch_terms: BatchTerms | None = None,
) -> LossTerms:
    """Loss of some rows of the batch, as a sum and its part of the denominator.

    Values are checked where ``batch_terms`` is None. ``prepare_update`` has checked everything that is fixed for the
    batch, on all ranks alike; with its terms only shapes and dtypes are looked at here, so that no GPU is waited for. A
    current log-prob that is NaN or infinite then makes ``loss_sum`` and the gradient NaN, which the update skips and
    counts on all ranks.

    ``batch_terms`` is what depends on the whole batch: ``prepare_update`` computes it before micro-batches are cut, and
    its ``rows`` hands over the right rows. A call with all rows of a batch needs it only where tokens are chosen
    batch-wide (top-entropy, Clip-Cov, KL-Cov) or corrected for the sampler's policy.

    Denominator (``weight``): all response tokens for ``loss_denominator="batch"``, responses with tokens for
    ``"response"`` and for sequence-level losses, ``norm_tokens`` a response for Dr.GRPO. For ``"group"`` (mean over
    groups of per-group means) each row has the weight ``row_weights`` a token (a response, at sequence level): one over
    its group's tokens (responses), so that a group's weights add up to 1 wherever its rows are.

    Args:
        config: its type names the algorithm.
        logprobs: ``[B, T]`` float32 or float64, nats, of the current policy; gradient flows.
        old_logprobs: ``[B, T]`` likewise, of the policy before the first update of the batch.
        advantages: ``[B, T]``, zero outside the mask; GRPO-S and GSPO take the first token's for the response.
        response_mask: ``[B, T]`` bool, left-aligned.
        group_ids: ``[B]`` labels, needed for ``loss_denominator="group"`` without ``batch_terms``; the rows given must
            then hold whole groups.
        batch_terms: of the same rows.

    Returns:
        Terms in the dtype of ``logprobs``; without rows or tokens ``loss_sum`` is ``0 * logprobs.sum()``, which still
        runs backward.

    Raises:
        ShapeError: a shape or dtype does not fit, or something batch-wide is missing.
        DataError: without ``batch_terms``: the mask is not left-aligned, or a value of a response token is not finite.
        ConfigError: ``config`` is none.
    """
    check_config(config)
    check_rank(2, logprobs=logprobs)
    shape = tuple(logprobs.shape)
    check_shape(shape, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    check_full_precision(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_mask(response_mask=response_mask)
    if batch_terms is None:
        left_aligned_lengths(response_mask)
        check_finite(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    terms = _resolve(config, response_mask, group_ids, batch_terms)
    advantages = advantages.detach().to(logprobs.dtype)
    log_ratios = log_ratio(logprobs, old_logprobs, response_mask)
    if isinstance(config, GRPOSConfig | GSPOConfig):
        loss = _sequence_terms(config, log_ratios, advantages, response_mask, terms)
    else:
        loss = _token_terms(config, logprobs, log_ratios, advantages, response_mask, terms)
    drift = torch.expm1(log_ratios.detach()) - log_ratios.detach()
    loss.statistics["policy/kl_old_nats"] = sum_count(drift, response_mask)
    # without rows or tokens there is no loss, but every rank must run backward
    anchor = torch.where(response_mask, logprobs, 0.0).sum() * 0.0
    return LossTerms(loss_sum=loss.loss_sum + anchor, weight=loss.weight, statistics=loss.statistics)


def loss_denominator(config: AlgorithmConfig) -> Denominator:
    """What makes one unit of the denominator; Dr.GRPO's counts responses times a constant instead."""
    match config:
        case GTPOConfig() | GRPOSConfig() | GRPOConfig() | DAPOConfig():
            return config.loss_denominator
        case _:
            return "batch"


def is_sequence_level(config: AlgorithmConfig) -> bool:
    """Whether the loss has one ratio a response."""
    return isinstance(config, GRPOSConfig | GSPOConfig)


def _resolve(
    config: AlgorithmConfig, response_mask: Tensor, group_ids: Tensor | None, terms: BatchTerms | None
) -> BatchTerms:
    """The terms given, checked; or those of rows that are a whole batch."""
    if terms is not None:
        check_shape((len(response_mask),), row_weights=terms.row_weights)
        for name, tensor in (("token_weights", terms.token_weights), ("token_selection", terms.token_selection)):
            if tensor is not None:
                check_shape(tuple(response_mask.shape), **{name: tensor})
    elif loss_denominator(config) == "group" and group_ids is None:
        raise ShapeError(
            "group_ids: got None, needed for loss_denominator='group'; or pass batch_terms, see prepare_update"
        )
    else:
        terms = BatchTerms(row_weights=_row_weights(config, response_mask, group_ids))
    if terms.token_selection is None and isinstance(config, TopEntropyConfig | ClipCovConfig | KLCovConfig):
        raise ShapeError(
            f"token_selection: got None; {type(config).__name__} chooses tokens over the whole batch; call "
            "prepare_update before cutting micro-batches and pass its rows"
        )
    return terms


def _row_weights(config: AlgorithmConfig, response_mask: Tensor, group_ids: Tensor | None) -> Tensor:
    group_index = None
    if group_ids is not None:
        check_shape((len(response_mask),), group_ids=group_ids)
        check_labels(group_ids=group_ids)
        group_index = torch.unique(group_ids, return_inverse=True)[1].to(response_mask.device)
    return row_weights(
        loss_denominator(config), response_mask.sum(1), group_index, is_sequence_level=is_sequence_level(config)
    )


def _sequence_terms(
    config: GRPOSConfig | GSPOConfig, log_ratios: Tensor, advantages: Tensor, response_mask: Tensor, terms: BatchTerms
) -> LossTerms:
    is_geometric = isinstance(config, GSPOConfig) or config.ratio_mean == "geometric"
    ratio = sequence_ratio(log_ratios, response_mask, is_geometric=is_geometric)
    is_live = response_mask.any(1)
    advantage = advantages[:, :1].sum(1)  # the first token's; a batch without columns has none
    low, high = config.clip_eps_low, config.clip_eps_high
    losses = clipped_surrogate(ratio, advantage, clip_eps_low=low, clip_eps_high=high, dual_clip=config.dual_clip)
    if terms.token_weights is not None:
        losses = losses * terms.token_weights[:, :1].sum(1).to(losses.dtype)
    losses = torch.where(is_live, losses, 0.0) * terms.row_weights.to(losses.dtype)
    return LossTerms(
        loss_sum=losses.sum(),
        weight=terms.row_weights[is_live].sum(),
        statistics=clip_statistics(ratio, advantage, is_live, clip_eps_low=low, clip_eps_high=high),
    )


def _token_terms(
    config: TokenLossConfig,
    logprobs: Tensor,
    log_ratios: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    terms: BatchTerms,
) -> LossTerms:
    ratio = torch.exp(log_ratios)
    low, high = (config.clip_eps_low, config.clip_eps_high) if isinstance(config, ClipSettings) else (1.0, math.inf)
    selection = terms.token_selection if terms.token_selection is not None else response_mask
    match config:
        case KLCovConfig():
            losses = kl_cov_loss(ratio, log_ratios, advantages, selection, kl_coef=config.kl_coef)
        case CISPOConfig():
            finite = torch.where(response_mask, logprobs, 0.0)
            losses = cispo_loss(finite, log_ratios, advantages, clip_eps_low=low, clip_eps_high=high)
        case _:
            losses = clipped_surrogate(
                ratio, advantages, clip_eps_low=low, clip_eps_high=high, dual_clip=config.dual_clip
            )
    kept = response_mask
    if isinstance(config, TopEntropyConfig):
        kept = response_mask & selection
    elif isinstance(config, ClipCovConfig):
        kept = response_mask & ~selection
    losses = torch.where(kept, losses, 0.0) * terms.row_weights.to(losses.dtype)[:, None]
    if terms.token_weights is not None:
        losses = losses * torch.where(response_mask, terms.token_weights, 0.0).to(losses.dtype)
    lengths = response_mask.sum(1)
    weight = (terms.row_weights * lengths).sum()
    if isinstance(config, DrGRPOConfig):
        weight = (lengths > 0).sum().to(torch.float64) * config.norm_tokens
    statistics = clip_statistics(ratio, advantages, response_mask, clip_eps_low=low, clip_eps_high=high)
    if terms.token_selection is not None:
        statistics["policy/selected_frac"] = sum_count(selection.to(ratio.dtype), response_mask)
    return LossTerms(loss_sum=losses.sum(), weight=weight, statistics=statistics)
