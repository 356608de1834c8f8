"""Computes the loss of some rows with the algorithm that the configuration selects."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_finite,
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_shape,
)
from gtpo_megatron.algorithms.losses.loss_batch import (
    LossInputs,
    LossTerms,
    UpdateBatch,
    first_of_response,
    log_ratio,
    sum_count,
)
from gtpo_megatron.algorithms.losses.reference_kl import with_reference_kl
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.errors import ShapeError


def policy_loss(
    config: AlgorithmConfig,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    group_ids: Tensor | None = None,
) -> LossTerms:
    """The loss of a whole batch, as a sum and a weight; :func:`update_loss` of some of its rows.

    Args:
        config: its type selects the algorithm.
        logprobs: ``[B, T]`` float32 or float64, nats, of the current policy; gradient flows.
        old_logprobs: ``[B, T]`` likewise, of the policy before the first update of the batch.
        advantages: ``[B, T]``, zero outside the mask; a loss of responses uses the first token's.
        response_mask: ``[B, T]`` bool, the policy's own tokens, in any arrangement.
        group_ids: ``[B]`` labels, needed for ``loss_denominator="group"``.

    Returns:
        Terms in the dtype of ``logprobs``.

    Raises:
        ShapeError: a shape or dtype does not fit, or the algorithm needs more than these (it chooses tokens over the
            batch, or reads log-probs of the sampler or of the reference policy), which only ``prepare_update`` has.
        DataError: a value of a response token is not finite.
        ConfigError: ``config`` is not the configuration of an algorithm.
    """
    algorithm = algorithm_of(config)
    check_num_dims(2, logprobs=logprobs)
    shape = tuple(logprobs.shape)
    check_shape(shape, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    check_mask(response_mask=response_mask)
    check_full_precision(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_finite(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    needs = {
        "token_selection": algorithm.select is not None,
        "rollout_logprobs": algorithm.needs_rollout_logprobs or config.off_policy.is_on,
        "ref_logprobs": config.reference_kl.in_loss,
    }
    for name, is_needed in needs.items():
        if is_needed:
            raise ShapeError(
                f"{name}: {type(config).__name__} needs it of the whole batch; call prepare_update, and update_loss "
                "with its rows"
            )
    denominator, per_response = algorithm.denominator(config), algorithm.ratio_of == "response"
    group_index = None
    if group_ids is not None:
        check_shape(shape[:1], group_ids=group_ids)
        check_labels(group_ids=group_ids)
        group_index = torch.unique(group_ids, return_inverse=True)[1].to(response_mask.device)
    elif denominator.unit == "group":
        raise ShapeError("group_ids: got None, needed for loss_denominator='group'")
    lengths = response_mask.sum(1)
    row_weights = denominator.row_weights(lengths, group_index, per_response=per_response)
    batch = UpdateBatch(
        old_logprobs=old_logprobs,
        advantages=advantages,
        response_mask=response_mask,
        row_weights=row_weights,
        denominator=denominator.total(row_weights, lengths, per_response=per_response),
        statistics={},
    )
    return update_loss(config, logprobs, batch)


def update_loss(config: AlgorithmConfig, logprobs: Tensor, batch: UpdateBatch) -> LossTerms:
    """The loss of some rows of a mini-batch, as a sum and a weight: the gradient is that of their sums' quotient.

    Values are not checked: ``prepare_update`` has checked them, and a check here would wait for the GPU. A current
    log-prob that is NaN or infinite makes ``loss_sum`` and the gradient NaN; the update is skipped and counted on all
    ranks.

    Args:
        config: its type selects the algorithm.
        logprobs: ``[B, T]`` float32 or float64, nats, of the current policy; gradient flows.
        batch: the same rows, ``prepare_update(...).select(rows, width)``.

    Returns:
        Terms in the dtype of ``logprobs``; for ``weight`` see ``Denominator``. Without rows or tokens ``loss_sum``
        is ``0 * logprobs.sum()``, which still runs backward.

    Raises:
        ShapeError: the shapes of the two differ.
    """
    algorithm, mask = algorithm_of(config), batch.response_mask
    check_shape(tuple(mask.shape), logprobs=logprobs)
    check_full_precision(logprobs=logprobs)

    def masked(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    inputs = LossInputs(
        logprobs=masked(logprobs),
        old_logprobs=masked(batch.old_logprobs.detach()),
        log_ratios=log_ratio(logprobs, batch.old_logprobs, mask),
        advantages=masked(batch.advantages.detach().to(logprobs.dtype)),
        mask=mask,
        selection=batch.token_selection,
        rollout_logprobs=None if batch.rollout_logprobs is None else masked(batch.rollout_logprobs.detach()),
        ref_logprobs=None if batch.ref_logprobs is None else masked(batch.ref_logprobs.detach()),
    )
    losses, per_response = algorithm.loss(config, inputs), algorithm.ratio_of == "response"
    if config.reference_kl.in_loss:
        losses = with_reference_kl(config.reference_kl, losses, inputs, per_response=per_response)
    is_live, weights, factors = mask, batch.row_weights.to(losses.dtype), batch.token_weights
    if per_response:
        is_live = mask.any(1)
        factors = None if factors is None else first_of_response(factors, mask)
    else:
        weights = weights[:, None]
    losses = torch.where(is_live, losses, 0.0) * weights
    if factors is not None:
        losses = losses * torch.where(is_live, factors, 0.0).to(losses.dtype)

    statistics = algorithm.metrics(config, inputs)
    drift = torch.expm1(inputs.log_ratios.detach()) - inputs.log_ratios.detach()
    statistics["policy/kl_old_nats"] = sum_count(drift, mask)
    if batch.token_selection is not None:
        statistics["policy/selected_frac"] = sum_count(batch.token_selection.to(losses.dtype), mask)
    return LossTerms(
        # every rank must run backward, also without rows or tokens; and clamping removes the gradient of a log-prob
        # that is not finite, so this term makes loss and gradient NaN, and the update is skipped
        loss_sum=losses.sum() + (inputs.logprobs * (inputs.logprobs.detach() * 0.0)).sum(),
        weight=algorithm.denominator(config).total(batch.row_weights, mask.sum(1), per_response=per_response),
        statistics=statistics,
    )
