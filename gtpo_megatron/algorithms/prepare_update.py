"""Computes the batch-wide inputs of the loss, once before the batch is split into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from gtpo_megatron.algorithms.assign_credit import Credit
from gtpo_megatron.algorithms.batch.checks import (
    check_finite,
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_shape,
    check_tensor,
)
from gtpo_megatron.algorithms.batch.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.batch.response_table import gather_table
from gtpo_megatron.algorithms.batch.tokens import Tokens
from gtpo_megatron.algorithms.credit.reference_kl import checked_reference
from gtpo_megatron.algorithms.losses.loss_terms import BatchTerms, SumCount, sum_count
from gtpo_megatron.algorithms.losses.off_policy import (
    correction_ratio,
    correction_statistics,
    correction_weights,
    vetoed,
)
from gtpo_megatron.algorithms.losses.selection import SelectionBatch
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import AlgorithmConfig, OffPolicyConfig
from gtpo_megatron.errors import ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTensors:
    """Inputs of ``policy_loss`` besides the current log-probs, for all rows of this rank.

    Attributes:
        old_logprobs: ``[B, T]``.
        advantages: ``[B, T]`` float32.
        response_mask: ``[B, T]`` bool.
        row_weights: ``[B]`` float64, see ``denominators``.
        token_weights: ``[B, T]``, weights of the off-policy correction; None: all 1.
        token_selection: ``[B, T]`` bool, tokens chosen over the batch; None if the algorithm chooses none.
        rollout_logprobs: ``[B, T]``, the sampler's; None if the algorithm does not need them.
        ref_logprobs: ``[B, T]``, the reference policy's; None if the loss has no term of it.
        weight: scalar float64 on the CPU, the denominator of the whole batch, over all ranks.
        statistics: off-policy statistics of this rank's tokens, additive over ranks; empty without
            ``rollout_logprobs``.
    """

    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    row_weights: Tensor
    token_weights: Tensor | None
    token_selection: Tensor | None
    rollout_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    weight: Tensor
    statistics: dict[str, SumCount]

    def to(self, device: torch.device) -> "UpdateTensors":
        """Moves all tensors but the statistics to another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device)
        return replace(self, **moved)

    def rows(self, index: Sequence[int] | Tensor, width: int | None = None) -> "UpdateRows":
        """Keyword arguments of ``policy_loss`` for the rows ``index``, cut to ``width`` tokens (None: all).

        ``policy_loss(config, logprobs=logprobs, **update.rows(index, logprobs.shape[1]))``
        """
        picked = torch.as_tensor(index, dtype=torch.int64).to(self.advantages.device, non_blocking=True)

        def cut(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix[picked, :width]

        return {
            "old_logprobs": self.old_logprobs[picked, :width],
            "advantages": self.advantages[picked, :width],
            "response_mask": self.response_mask[picked, :width],
            "batch_terms": BatchTerms(
                row_weights=self.row_weights[picked],
                token_weights=cut(self.token_weights),
                token_selection=cut(self.token_selection),
                rollout_logprobs=cut(self.rollout_logprobs),
                ref_logprobs=cut(self.ref_logprobs),
            ),
        }


class UpdateRows(TypedDict):
    """Keyword arguments of ``policy_loss`` besides the current log-probs."""

    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    batch_terms: BatchTerms


def prepare_update(  # noqa: PLR0913 - tensors of the same rows
    config: AlgorithmConfig,
    *,
    credit: Credit,
    token_entropy: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    reduction: Reduction | None = None,
) -> UpdateTensors:
    """Computes row weights, selected tokens and the off-policy correction from the whole batch.

    Args:
        config: its type selects the algorithm.
        credit: credit of the same rows.
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
    reduction = reduction or LocalReduction()
    local: list[tuple[Tokens, Tensor]] = []

    def read() -> tuple[Tensor, Tensor, Tensor]:
        algorithm = algorithm_of(config)
        check_tensor(token_entropy=token_entropy, response_mask=response_mask, group_ids=group_ids)
        check_num_dims(2, token_entropy=token_entropy)
        shape = tuple(token_entropy.shape)
        check_shape(shape[:1], group_ids=group_ids)
        check_labels(group_ids=group_ids)
        check_shape(shape, response_mask=response_mask, old_logprobs=old_logprobs, advantages=credit.advantages)
        check_mask(response_mask=response_mask)
        check_full_precision(token_entropy=token_entropy, old_logprobs=old_logprobs, advantages=credit.advantages)
        check_finite(response_mask, advantages=credit.advantages)
        tokens = Tokens.of(response_mask)
        if algorithm.select is not None:
            tokens.checked("token_entropy", token_entropy)
        flat_old = -tokens.checked("old_logprobs", old_logprobs, sign=-1.0)
        if rollout_logprobs is not None:
            check_shape(shape, rollout_logprobs=rollout_logprobs)
            check_full_precision(rollout_logprobs=rollout_logprobs)
            tokens.checked("rollout_logprobs", rollout_logprobs, sign=-1.0)
        elif config.off_policy.is_on or algorithm.needs_rollout_logprobs:
            needs = (
                type(config).__name__
                if not config.off_policy.is_on
                else f"off_policy.mode={config.off_policy.mode!r}, veto_nats={config.off_policy.veto_nats:g}"
            )
            raise ShapeError(f"rollout_logprobs: got None, needed for {needs}")
        if config.reference_kl.in_loss:
            checked_reference(config.reference_kl, ref_logprobs, tokens)
        local.append((tokens, flat_old))
        no_rewards = torch.zeros(len(group_ids), dtype=torch.float64)  # the advantages already contain the outcomes
        return no_rewards, group_ids, tokens.lengths

    # all ranks must agree on this: statistics of some of them only could not be added
    signature = f"update {config!r} rollout_logprobs={rollout_logprobs is not None}"
    with torch.no_grad():
        table = gather_table(read, success_threshold=0.0, reduction=reduction, signature=signature)
        algorithm, ((tokens, flat_old),) = algorithm_of(config), local
        denominator, per_response = algorithm.denominator(config), algorithm.ratio_of == "response"
        weights = denominator.row_weights(table.lengths, table.group_index, per_response=per_response)
        token_weights, statistics = _correct(config.off_policy, old_logprobs, rollout_logprobs, response_mask)
        selection = None
        if algorithm.select is not None:
            batch = SelectionBatch(
                tokens=tokens,
                entropy=tokens.pick(token_entropy).to(torch.float64),
                old_logprobs=flat_old,
                advantages=tokens.pick(credit.advantages).to(torch.float64),
                num_tokens=int(table.lengths.sum()),
                reduction=reduction,
            )
            selection = tokens.put(algorithm.select(config, batch)).bool()
        return UpdateTensors(
            old_logprobs=old_logprobs.detach(),
            advantages=credit.advantages,
            response_mask=response_mask,
            row_weights=weights[table.mine].to(response_mask.device),
            token_weights=token_weights,
            token_selection=selection,
            rollout_logprobs=rollout_logprobs if algorithm.needs_rollout_logprobs else None,
            ref_logprobs=ref_logprobs if config.reference_kl.in_loss else None,
            weight=denominator.of_batch(table.lengths, table.group_index, per_response=per_response),
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
