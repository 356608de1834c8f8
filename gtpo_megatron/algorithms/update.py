"""Everything about the whole batch that an update needs, computed once before micro-batches are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import check_config, check_full_precision, check_shape
from gtpo_megatron.algorithms.covariance import token_covariance
from gtpo_megatron.algorithms.credit import Credit, success_threshold
from gtpo_megatron.algorithms.denominators import row_weights
from gtpo_megatron.algorithms.fixed_point import from_limbs, grid_scale, to_limbs
from gtpo_megatron.algorithms.hashing import row_seeds, token_hashes
from gtpo_megatron.algorithms.loss_terms import BatchTerms, SumCount
from gtpo_megatron.algorithms.off_policy import correction_ratio, correction_statistics, correction_weights
from gtpo_megatron.algorithms.policy_loss import is_sequence_level, loss_denominator
from gtpo_megatron.algorithms.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.rows import RowFacts, check_finite, check_inputs, row_facts
from gtpo_megatron.algorithms.selection import largest, ordered_integers
from gtpo_megatron.algorithms.table import ResponseTable, gather_table
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    ClipCovConfig,
    KLCovConfig,
    OffPolicyConfig,
    TopEntropyConfig,
)
from gtpo_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTensors:
    """What ``policy_loss`` takes of each row besides the current log-probs; rows can be cut anywhere.

    Attributes:
        old_logprobs: ``[B, T]``.
        advantages: ``[B, T]`` float32.
        response_mask: ``[B, T]`` bool.
        row_weights: ``[B]`` float64, see ``denominators``.
        token_weights: ``[B, T]``, off-policy correction; None: all 1.
        token_selection: ``[B, T]`` bool, tokens chosen over the batch; None where the algorithm chooses none.
        statistics: of the off-policy correction, of this rank's tokens: additive over ranks; empty without
            ``rollout_logprobs``.
    """

    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    row_weights: Tensor
    token_weights: Tensor | None
    token_selection: Tensor | None
    statistics: dict[str, SumCount]

    def to(self, device: torch.device) -> "UpdateTensors":
        """The same on another device; the statistics stay."""
        return replace(
            self,
            old_logprobs=self.old_logprobs.to(device),
            advantages=self.advantages.to(device),
            response_mask=self.response_mask.to(device),
            row_weights=self.row_weights.to(device),
            token_weights=None if self.token_weights is None else self.token_weights.to(device),
            token_selection=None if self.token_selection is None else self.token_selection.to(device),
        )

    def rows(self, index: Sequence[int] | Tensor, width: int | None = None) -> "UpdateRows":
        """Keyword arguments of ``policy_loss`` for some rows, cut to ``width`` tokens (None: all).

        ``policy_loss(config, logprobs=logprobs, **update.rows(index, logprobs.shape[1]))``
        """
        picked = torch.as_tensor(index, dtype=torch.int64, device=self.advantages.device)

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
            ),
        }


class UpdateRows(TypedDict):
    """Keyword arguments of ``policy_loss`` besides the current log-probs."""

    old_logprobs: Tensor
    advantages: Tensor
    response_mask: Tensor
    batch_terms: BatchTerms


def prepare_update(
    config: AlgorithmConfig,
    *,
    credit: Credit,
    token_entropy: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    reduction: Reduction | None = None,
) -> UpdateTensors:
    """Row weights, token selections and off-policy correction, from the whole batch; the same call for every algorithm.

    Clip-Cov and KL-Cov take covariances of the old policy's log-probs, so the choice is fixed before the first update.

    Args:
        config: its type names the algorithm.
        credit: of the same rows.
        token_entropy: ``[B, T]``.
        response_mask: ``[B, T]`` bool.
        group_ids: ``[B]``.
        old_logprobs: ``[B, T]`` float32 or float64, nats.
        rollout_logprobs: ``[B, T]`` nats, by the sampler; needed for an off-policy correction.
        reduction: sums over ranks; None: all responses are here.

    Raises:
        ShapeError: a shape or dtype does not fit.
        DataError: on a response token a log-prob is not finite or above 0, an advantage is not finite, or (where
            tokens are chosen by it) an entropy is bad; or the mask is not left-aligned.
        ConfigError: ``config`` is none. All on all ranks alike. What is checked here once a batch, ``policy_loss`` does
            not look at again.
    """
    reduction = reduction or LocalReduction()

    def read() -> tuple[Tensor, Tensor, RowFacts, Tensor]:
        check_config(config)
        no_rewards = torch.zeros(len(group_ids), dtype=torch.float64)  # outcomes are in the advantages already
        check_inputs(no_rewards, token_entropy, response_mask, group_ids)
        check_shape(tuple(response_mask.shape), old_logprobs=old_logprobs, advantages=credit.advantages)
        check_full_precision(old_logprobs=old_logprobs, advantages=credit.advantages)
        check_finite(response_mask, advantages=credit.advantages)
        if isinstance(config, TopEntropyConfig):
            row_facts("token_entropy", token_entropy, response_mask)
        facts = row_facts("old_logprobs", -old_logprobs.detach(), response_mask, is_negated=True)
        if rollout_logprobs is not None:
            check_shape(tuple(response_mask.shape), rollout_logprobs=rollout_logprobs)
            check_full_precision(rollout_logprobs=rollout_logprobs)
            row_facts("rollout_logprobs", -rollout_logprobs.detach(), response_mask, is_negated=True)
        elif config.off_policy.mode != "off":
            raise DataError(f"rollout_logprobs: got None, needed for off_policy.mode={config.off_policy.mode!r}")
        return no_rewards, group_ids, facts, no_rewards

    with torch.no_grad():
        table = gather_table(
            read, success_threshold=success_threshold(config), reduction=reduction, signature=f"update {config!r}"
        )
        weights = row_weights(
            loss_denominator(config), table.lengths, table.group_index, is_sequence_level=is_sequence_level(config)
        )
        token_weights, statistics = _correct(config.off_policy, old_logprobs, rollout_logprobs, response_mask)
        return UpdateTensors(
            old_logprobs=old_logprobs.detach(),
            advantages=credit.advantages,
            response_mask=response_mask,
            row_weights=weights[table.mine].to(response_mask.device),
            token_weights=token_weights,
            token_selection=_select(
                config, credit.advantages, token_entropy, old_logprobs, response_mask, table, reduction
            ),
            statistics=statistics,
        )


def off_policy_statistics(
    config: OffPolicyConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor
) -> dict[str, SumCount]:
    """``correction_statistics`` of the correction that is configured, whether it is made or ``off``."""
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
    if config.mode == "off":
        return None, statistics
    ratio = correction_ratio(old_logprobs, rollout_logprobs, response_mask, config.level)
    weights = correction_weights(ratio, masks=config.mode == "mask", lower=config.lower, upper=config.upper)
    return weights, statistics


def _select(
    config: AlgorithmConfig,
    advantages: Tensor,
    token_entropy: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    table: ResponseTable,
    reduction: Reduction,
) -> Tensor | None:
    num_tokens = int(table.lengths.sum())
    match config:
        case TopEntropyConfig():
            keys = ordered_integers(torch.where(response_mask, token_entropy, 0.0).clamp(min=0.0))
            return largest(keys, response_mask, _at_least_one(config.top_fraction, num_tokens), reduction)
        case ClipCovConfig():
            covariance = _covariance(advantages, old_logprobs, response_mask, table, reduction)
            candidates = response_mask & (covariance >= config.cov_low) & (covariance <= config.cov_high)
            keys = token_hashes(row_seeds(old_logprobs, response_mask, config.seed), response_mask.shape[1]) >> 31
            return largest(keys, candidates, _at_least_one(config.clip_fraction, num_tokens), reduction)
        case KLCovConfig():
            keys = ordered_integers(_covariance(advantages, old_logprobs, response_mask, table, reduction))
            return largest(keys, response_mask, _at_least_one(config.penalised_fraction, num_tokens), reduction)
        case _:
            return None


def _at_least_one(fraction: float, num_tokens: int) -> int:
    """``fraction`` of the tokens, rounded down but not to none; 0 only where the fraction is 0."""
    return max(1, int(fraction * num_tokens)) if fraction > 0 else 0


def _covariance(
    advantages: Tensor, old_logprobs: Tensor, response_mask: Tensor, table: ResponseTable, reduction: Reduction
) -> Tensor:
    count = max(1, int(table.lengths.sum()))
    means = []
    for values in (old_logprobs, advantages):
        masked = torch.where(response_mask, values, 0.0).to(torch.float64)
        peak = reduction.max(masked.abs().amax().cpu()[None] if masked.numel() else torch.zeros(1, dtype=torch.float64))
        longest = int(table.lengths.max()) if len(table.lengths) else 0
        scale = grid_scale(peak * longest)
        sums = torch.round(masked * scale.to(masked.device)).to(torch.int64).sum(1).cpu()
        means.append(float(from_limbs(reduction.sum(to_limbs(sums).sum(0))) / scale) / count)
    covariance = token_covariance(old_logprobs.to(torch.float64), advantages.to(torch.float64), means[0], means[1])
    return torch.where(response_mask, covariance, 0.0)
