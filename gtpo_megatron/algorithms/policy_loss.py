"""Computes the loss of some rows with the algorithm that the configuration selects."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.algorithm import Algorithm
from gtpo_megatron.algorithms.batch.checks import (
    check_finite,
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_shape,
)
from gtpo_megatron.algorithms.losses.loss_inputs import LossInputs, first_of_response
from gtpo_megatron.algorithms.losses.loss_terms import BatchTerms, LossTerms, sum_count
from gtpo_megatron.algorithms.losses.ratios import log_ratio
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
    batch_terms: BatchTerms | None = None,
) -> LossTerms:
    """Loss of some rows of the batch, as a sum and a weight.

    ``batch_terms`` holds what depends on the whole batch; ``prepare_update(...).rows(...)`` returns it for the rows of
    a micro-batch. A call with all rows of a batch needs it only if the algorithm selects tokens (top-entropy, Clip-Cov,
    KL-Cov) or needs log-probs of the sampler or of the reference policy.

    Values are checked only if ``batch_terms`` is None: ``prepare_update`` has checked them, and a check here would wait
    for the GPU. A current log-prob that is NaN or infinite then makes ``loss_sum`` and the gradient NaN; the update
    is skipped and counted on all ranks.

    Args:
        config: its type selects the algorithm.
        logprobs: ``[B, T]`` float32 or float64, nats, of the current policy; gradient flows.
        old_logprobs: ``[B, T]`` likewise, of the policy before the first update of the batch.
        advantages: ``[B, T]``, zero outside the mask; a loss of responses uses the first token's.
        response_mask: ``[B, T]`` bool, the policy's own tokens, in any arrangement.
        group_ids: ``[B]`` labels, needed for ``loss_denominator="group"`` without ``batch_terms``; the rows given must
            then hold whole groups.
        batch_terms: batch-wide inputs for the same rows.

    Returns:
        Terms in the dtype of ``logprobs``; for ``weight`` see ``Denominator``. Without rows or tokens ``loss_sum``
        is ``0 * logprobs.sum()``, which still runs backward.

    Raises:
        ShapeError: a shape or dtype does not fit, or something batch-wide is missing.
        DataError: without ``batch_terms``: a value of a response token is not finite.
        ConfigError: ``config`` is not the configuration of an algorithm.
    """
    algorithm = algorithm_of(config)
    check_num_dims(2, logprobs=logprobs)
    shape = tuple(logprobs.shape)
    check_shape(shape, old_logprobs=old_logprobs, advantages=advantages, response_mask=response_mask)
    check_full_precision(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_mask(response_mask=response_mask)
    if batch_terms is None:
        check_finite(response_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    terms = _resolve(config, algorithm, response_mask, group_ids, batch_terms)

    def masked(values: Tensor) -> Tensor:
        return torch.where(response_mask, values, 0.0)

    inputs = LossInputs(
        logprobs=masked(logprobs),
        old_logprobs=masked(old_logprobs.detach()),
        log_ratios=log_ratio(logprobs, old_logprobs, response_mask),
        advantages=masked(advantages.detach().to(logprobs.dtype)),
        mask=response_mask,
        selection=terms.token_selection,
        rollout_logprobs=None if terms.rollout_logprobs is None else masked(terms.rollout_logprobs.detach()),
        ref_logprobs=None if terms.ref_logprobs is None else masked(terms.ref_logprobs.detach()),
    )
    losses, per_response = algorithm.loss(config, inputs), algorithm.ratio_of == "response"
    if config.reference_kl.in_loss:
        losses = with_reference_kl(config.reference_kl, losses, inputs, per_response=per_response)
    is_live, weights, factors = response_mask, terms.row_weights.to(losses.dtype), terms.token_weights
    if per_response:
        is_live = response_mask.any(1)
        factors = None if factors is None else first_of_response(factors, response_mask)
    else:
        weights = weights[:, None]
    losses = torch.where(is_live, losses, 0.0) * weights
    if factors is not None:
        losses = losses * torch.where(is_live, factors, 0.0).to(losses.dtype)

    statistics = algorithm.metrics(config, inputs)
    drift = torch.expm1(inputs.log_ratios.detach()) - inputs.log_ratios.detach()
    statistics["policy/kl_old_nats"] = sum_count(drift, response_mask)
    if terms.token_selection is not None:
        statistics["policy/selected_frac"] = sum_count(terms.token_selection.to(losses.dtype), response_mask)
    return LossTerms(
        # every rank must run backward, also without rows or tokens; and clamping removes the gradient of a log-prob
        # that is not finite, so this term makes loss and gradient NaN, and the update is skipped
        loss_sum=losses.sum() + (inputs.logprobs * (inputs.logprobs.detach() * 0.0)).sum(),
        weight=algorithm.denominator(config).total(terms.row_weights, response_mask.sum(1), per_response=per_response),
        statistics=statistics,
    )


def _resolve(
    config: AlgorithmConfig,
    algorithm: Algorithm,
    response_mask: Tensor,
    group_ids: Tensor | None,
    terms: BatchTerms | None,
) -> BatchTerms:
    """Checks the given terms, or computes them if the rows are a whole batch."""
    denominator = algorithm.denominator(config)
    if terms is not None:
        check_shape((len(response_mask),), row_weights=terms.row_weights)
        for name in ("token_weights", "token_selection", "rollout_logprobs", "ref_logprobs"):
            tensor = getattr(terms, name)
            if tensor is not None:
                check_shape(tuple(response_mask.shape), **{name: tensor})
    elif denominator.unit == "group" and group_ids is None:
        raise ShapeError(
            "group_ids: got None, needed for loss_denominator='group'; or pass batch_terms, see prepare_update"
        )
    else:
        group_index = None
        if group_ids is not None:
            check_shape((len(response_mask),), group_ids=group_ids)
            check_labels(group_ids=group_ids)
            group_index = torch.unique(group_ids, return_inverse=True)[1].to(response_mask.device)
        terms = BatchTerms(
            row_weights=denominator.row_weights(
                response_mask.sum(1), group_index, per_response=algorithm.ratio_of == "response"
            )
        )
    if terms.token_selection is None and algorithm.select is not None:
        raise ShapeError(
            f"token_selection: got None; {type(config).__name__} chooses tokens over the whole batch; call "
            "prepare_update before cutting micro-batches and pass its rows"
        )
    if terms.rollout_logprobs is None and algorithm.needs_rollout_logprobs:
        raise ShapeError(
            f"rollout_logprobs: got None; {type(config).__name__} compares with the sampler's policy; pass them to "
            "prepare_update, and its rows here"
        )
    if terms.ref_logprobs is None and config.reference_kl.in_loss:
        raise ShapeError(
            f"ref_logprobs: got None, needed for reference_kl.coef={config.reference_kl.coef}; pass them to "
            "prepare_update, and its rows here"
        )
    return terms
