"""Computes the batch-wide inputs of the loss, once before the batch is split into micro-batches."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_finite,
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_shape,
    check_tensor,
    flatten,
    flatten_entropies,
    flatten_logprobs,
)
from gtpo_megatron.algorithms.credit.reference_kl import check_reference
from gtpo_megatron.algorithms.losses.loss_batch import SumCount, UpdateBatch, sum_count
from gtpo_megatron.algorithms.losses.off_policy import (
    correction_ratio,
    correction_statistics,
    correction_weights,
    vetoed,
)
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import CreditBatch, ResponseTable, own_lengths, table_rows
from gtpo_megatron.config.algorithm import AlgorithmConfig, OffPolicyConfig
from gtpo_megatron.errors import ShapeError


def prepare_update(  # noqa: PLR0913 - tensors of the same rows
    config: AlgorithmConfig,
    *,
    advantages: Tensor,
    token_entropy: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    reduction: Reduction | None = None,
) -> UpdateBatch:
    """Computes row weights, selected tokens and the off-policy correction from the whole batch.

    Args:
        config: its type selects the algorithm.
        advantages: ``[B, T]``, of ``assign_credit`` on the rollout batch.
        token_entropy: ``[B, T]``.
        response_mask: ``[B, T]`` bool, the policy's own tokens that enter the loss, in any arrangement.
        group_ids: ``[B]``.
        old_logprobs: ``[B, T]`` float32 or float64, nats.
        rollout_logprobs: ``[B, T]`` nats, the sampler's; needed for an off-policy correction, and by DPPO.
        ref_logprobs: ``[B, T]`` nats, the reference policy's; needed for ``reference_kl`` in the loss.
        reduction: sums over ranks; None: this process holds all responses.

    Raises:
        ShapeError: a shape or dtype does not fit, or log-probs of the sampler or the reference are needed and missing.
        DataError: on a response token a log-prob is not finite or above 0, an advantage is not finite, or (if tokens
            are selected) an entropy cannot be used.
        ConfigError: ``config`` is not the configuration of an algorithm. Each error is raised on all ranks.
    """
    reduction = reduction or Reduction()

    def read() -> tuple[Tensor, Tensor, Tensor]:
        algorithm = algorithm_of(config)
        check_tensor(token_entropy=token_entropy, response_mask=response_mask, group_ids=group_ids)
        check_num_dims(2, token_entropy=token_entropy)
        shape = tuple(token_entropy.shape)
        check_shape(shape[:1], group_ids=group_ids)
        check_labels(group_ids=group_ids)
        check_shape(shape, response_mask=response_mask, old_logprobs=old_logprobs, advantages=advantages)
        check_mask(response_mask=response_mask)
        check_full_precision(token_entropy=token_entropy, old_logprobs=old_logprobs, advantages=advantages)
        check_finite(response_mask, advantages=advantages)
        entropy = token_entropy.new_zeros(0)  # only a selection reads it
        if algorithm.select is not None:
            entropy = flatten_entropies(response_mask, token_entropy)
        old = flatten_logprobs(response_mask, old_logprobs=old_logprobs)
        if rollout_logprobs is not None:
            check_shape(shape, rollout_logprobs=rollout_logprobs)
            check_full_precision(rollout_logprobs=rollout_logprobs)
            flatten_logprobs(response_mask, rollout_logprobs=rollout_logprobs)
        elif config.off_policy.is_on or algorithm.needs_rollout_logprobs:
            needs = (
                type(config).__name__
                if not config.off_policy.is_on
                else f"off_policy.mode={config.off_policy.mode!r}, veto_nats={config.off_policy.veto_nats:g}"
            )
            raise ShapeError(f"rollout_logprobs: got None, needed for {needs}")
        if config.reference_kl.in_loss:
            check_reference(config.reference_kl, ref_logprobs, response_mask)
        no_rewards = torch.zeros(len(group_ids), dtype=torch.float64)  # the advantages already contain the outcomes
        rows = table_rows(no_rewards, group_ids, own_lengths(response_mask), success_threshold=0.0)
        return rows, entropy, old

    # all ranks must agree on this: statistics of some of them only could not be added
    signature = f"update {config!r} rollout_logprobs={rollout_logprobs is not None}"
    with torch.no_grad():
        rows, flat_entropy, flat_old = reduction.agree(read, signature)
        table = ResponseTable.of(*reduction.gather(rows))
        algorithm = algorithm_of(config)
        denominator, per_response = algorithm.denominator(config), algorithm.ratio_of == "response"
        weights = denominator.row_weights(table.lengths, table.group_index, per_response=per_response)
        token_weights, statistics = _correct(config.off_policy, old_logprobs, rollout_logprobs, response_mask)
        selection = None
        if algorithm.select is not None:
            batch = CreditBatch.of(
                response_mask, table, entropy=flat_entropy, old_logprobs=flat_old, reduction=reduction
            )
            flat_advantages = flatten(response_mask, advantages).to(torch.float64)
            selection = batch.padded(algorithm.select(config, batch, flat_advantages)).bool()
        return UpdateBatch(
            old_logprobs=old_logprobs.detach(),
            advantages=advantages,
            response_mask=response_mask,
            row_weights=weights[table.mine].to(response_mask.device),
            token_weights=token_weights,
            token_selection=selection,
            rollout_logprobs=rollout_logprobs if algorithm.needs_rollout_logprobs else None,
            ref_logprobs=ref_logprobs if config.reference_kl.in_loss else None,
            denominator=denominator.of_batch(table.lengths, table.group_index, per_response=per_response),
            statistics=statistics,
        )


def off_policy_statistics(
    config: OffPolicyConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor
) -> dict[str, SumCount]:
    """``correction_statistics`` with the configured level and bounds, also if the mode is ``off``."""
    ratio = correction_ratio(old_logprobs, rollout_logprobs, response_mask, config.level)
    return correction_statistics(
        ratio, old_logprobs, rollout_logprobs, response_mask, lower=config.lower, upper=config.upper
    )


def _correct(
    config: OffPolicyConfig, old_logprobs: Tensor, rollout_logprobs: Tensor | None, response_mask: Tensor
) -> tuple[Tensor | None, dict[str, SumCount]]:
    if rollout_logprobs is None:
        return None, {}
    statistics = off_policy_statistics(config, old_logprobs, rollout_logprobs, response_mask)
    if not config.is_on:
        return None, statistics
    weights = torch.ones_like(old_logprobs)
    if config.mode != "off":
        ratio = correction_ratio(old_logprobs, rollout_logprobs, response_mask, config.level)
        weights = correction_weights(ratio, masks=config.mode == "mask", lower=config.lower, upper=config.upper)
    if config.veto_nats > 0:
        is_dropped = vetoed(old_logprobs, rollout_logprobs, response_mask, config.veto_nats)
        weights = torch.where(is_dropped[:, None], 0.0, weights)
        statistics["off_policy/vetoed_frac"] = sum_count(is_dropped.to(weights.dtype), response_mask.any(1))
    return weights, statistics
