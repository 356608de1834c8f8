"""The facade of credit: from rewards and entropies to advantages, by the type of the configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms import controls, shaping
from gtpo_megatron.algorithms.credit_inputs import CreditInputs
from gtpo_megatron.algorithms.diagnostics import credit_metrics
from gtpo_megatron.algorithms.entropy_advantage import add_entropy_bonus
from gtpo_megatron.algorithms.group_relative import group_relative_credit
from gtpo_megatron.algorithms.grpo_s import grpo_s_credit
from gtpo_megatron.algorithms.gtpo import gtpo_credit
from gtpo_megatron.algorithms.length_penalty import group_relative_overlong, soft_overlong
from gtpo_megatron.algorithms.pools import Standardised
from gtpo_megatron.algorithms.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.responses import spread_over_tokens
from gtpo_megatron.algorithms.segments import comparison_scope
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules
from gtpo_megatron.algorithms.share_grid import ShareRule, TokenWeights
from gtpo_megatron.algorithms.shares import Shares
from gtpo_megatron.algorithms.table import ResponseTable, gather_table
from gtpo_megatron.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    DrGRPOConfig,
    EntropyAdvantageConfig,
    EntropyCreditSettings,
    GRPOSConfig,
    GTPOConfig,
)
from gtpo_megatron.config.length_penalty import (
    GroupRelativeLengthPenalty,
    LengthPenaltyConfig,
    NoLengthPenalty,
    SoftOverlongPenalty,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """What every token of this rank's responses earned.

    Attributes:
        shaped_rewards: ``[B, T]`` float32, zero outside the mask.
        advantages: ``[B, T]`` float32, zero outside the mask; no gradient.
        metrics: of the whole batch, the same on every rank; see ``diagnostics``.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    metrics: dict[str, float]


def assign_credit(
    config: AlgorithmConfig,
    *,
    rewards: Tensor,
    token_entropy: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor | None = None,
    shaping_mask: Tensor | None = None,
    reduction: Reduction | None = None,
) -> Credit:
    """Advantages of every response token, fixed before the first update.

    Args:
        config: its type names the algorithm.
        rewards: ``[B]`` any real dtype, raw outcome rewards; taken as float64.
        token_entropy: ``[B, T]`` float32 or float64, nats over the full vocabulary of the old policy; bf16 is refused.
        response_mask: ``[B, T]`` bool, left-aligned; a row without tokens gets zeros and is in no set and no pool.
        group_ids: ``[B]`` integer labels of prompt groups.
        old_logprobs: ``[B, T]`` nats; needed for ``weight_source="surprisal"`` only.
        shaping_mask: ``[B, T]`` bool; tokens where it is False (formatting, say) get the neutral share 1 and enter no
            comparison. GTPO and GRPO-S only.
        reduction: sums over ranks; None: all responses are here.

    Returns:
        Credit for this rank's rows; bit for bit the same for any order of the rows and any dealing of them to ranks.

    Raises:
        ShapeError: a shape or dtype does not fit.
        DataError: a value cannot be used. Both on all ranks alike.
    """
    inputs = CreditInputs(config, rewards, token_entropy, response_mask, group_ids, old_logprobs, shaping_mask)
    # what all ranks must agree on: a mask on some of them only would send them to different collectives
    signature = f"credit {config!r} shaping_mask={shaping_mask is not None}"
    reduction = reduction or LocalReduction()
    with torch.no_grad():
        table = gather_table(
            inputs.read, success_threshold=success_threshold(config), reduction=reduction, signature=signature
        )
        penalties = length_penalties(config.length_penalty, table)
        result, shares = _dispatch(config, inputs, table, penalties, reduction)
        metrics = credit_metrics(
            result.flips,
            table,
            inputs.entropy_total,
            shares,
            reduction,
            shares_are_global=isinstance(config, GRPOSConfig),
            lone_scope=_lone_scope(config, table, is_masked=shaping_mask is not None),
        )
    return Credit(shaped_rewards=result.shaped_rewards, advantages=result.advantages, metrics=metrics)


def success_threshold(config: AlgorithmConfig) -> float:
    """From which reward on a response is correct; any number for what is no configuration, so that all ranks raise."""
    return config.success_threshold if isinstance(config, ALGORITHMS) else 0.0


def _dispatch(
    config: AlgorithmConfig, inputs: CreditInputs, table: ResponseTable, penalties: Tensor, reduction: Reduction
) -> tuple[Standardised, Shares | None]:
    match config:
        case GTPOConfig():
            tokens = TokenWeights(
                values=inputs.weights,
                response_mask=inputs.response_mask,
                shaping_mask=inputs.shaping_mask,
                padding_is_harmless=inputs.padding_is_harmless,
                has_negatives=inputs.has_negatives,
                name=inputs.weights_name,
            )
            rules, pooled = _gtpo_rules(config), _pooled(config, table)
            return gtpo_credit(tokens, table, rules, reduction, penalties=penalties, is_pooled=pooled)
        case GRPOSConfig():
            weights, pooled = _sequence_weights(config, table), _pooled(config, table)
            result, shares = grpo_s_credit(
                table,
                weights,
                _grpo_s_rules(config),
                penalties=penalties,
                is_pooled=pooled,
                name=f"mean {inputs.weights_name}",
            )
            return spread_over_tokens(result, table, inputs.response_mask), shares
    result = group_relative_credit(
        table,
        penalties=penalties,
        ddof=config.std_ddof,
        eps=config.std_eps,
        divides_by_std=not isinstance(config, DrGRPOConfig),
    )
    spread = spread_over_tokens(result, table, inputs.response_mask)
    if isinstance(config, EntropyAdvantageConfig):
        add_entropy_bonus(
            spread.advantages,
            inputs.token_entropy,
            inputs.response_mask,
            coefficient=config.coefficient,
            bound=config.bound,
        )
    return spread, None


def _lone_scope(config: AlgorithmConfig, table: ResponseTable, *, is_masked: bool) -> Tensor | None:
    """Whose responses a token is alone among where its share is 1 by its position; None: lengths do not tell."""
    if not isinstance(config, GTPOConfig):
        return table.group_index
    if config.entropy_axis != "position" or is_masked:
        return None
    return comparison_scope(table, spans_batch=config.entropy_scope == "batch")


def _gtpo_rules(config: GTPOConfig) -> ShapingRules:
    sides = shaping.formulation_sides(config.formulation, config.alpha1, config.alpha2, config.kappa)
    return ShapingRules(
        share=ShareRule(
            axis=config.entropy_axis,
            is_geometric=config.entropy_mean == "geometric",
            spans_batch=config.entropy_scope == "batch",
            floor=config.entropy_floor,
            clip=config.entropy_clip,
            inverts=sides[0].slope != 0,
            may_be_narrow=_pools_may_be_narrow(config),
        ),
        sides=sides,
        pool=_pool_rule(config, config.advantage_scope),
    )


def _grpo_s_rules(config: GRPOSConfig) -> ShapingRules:
    sides = shaping.formulation_sides(config.formulation, config.beta1, config.beta2, config.kappa)
    return ShapingRules(
        share=ShareRule(
            is_geometric=config.entropy_mean == "geometric",
            spans_batch=config.entropy_scope == "batch",
            floor=0.0,  # the tokens' entropies have it already
            inverts=sides[0].slope != 0,
        ),
        sides=sides,
        pool=_pool_rule(config, config.advantage_scope),
    )


def _pools_may_be_narrow(config: GTPOConfig) -> bool:
    """Whether a pool may hold one side only: its range must then be known at both ends, or its std loses digits."""
    return config.one_sided_groups == "keep" or _pool_rule(config, config.advantage_scope).kind == "per_set"


def _pool_rule(config: EntropyCreditSettings, scope: str) -> PoolRule:
    return PoolRule(
        spans_batch=scope == "batch",
        kind="combined" if config.formulation in shaping.SINGLE_POOL else config.advantage_pool,
        ddof=config.std_ddof,
        eps=config.std_eps,
    )


def _pooled(config: EntropyCreditSettings, table: ResponseTable) -> Tensor:
    if config.one_sided_groups == "keep":
        return table.is_live
    return table.is_live & ~table.is_one_sided[table.group_index]


def _sequence_weights(config: GRPOSConfig, table: ResponseTable) -> Tensor:
    weights = table.mean
    if config.weight_source == "shuffled":
        weights = controls.shuffle_within_segments(
            table, weights, config.weight_seed, spans_batch=config.entropy_scope == "batch"
        )
    if config.shaped_sides != "both":
        is_neutral = ~table.is_correct if config.shaped_sides == "positive" else table.is_correct
        weights = torch.where(is_neutral, 1.0, weights)
    return weights


def length_penalties(config: LengthPenaltyConfig, table: ResponseTable) -> Tensor:
    """``R_i`` of every response of the batch, ``[R]`` float64; see ``length_penalty``."""
    match config:
        case NoLengthPenalty():
            return torch.zeros_like(table.rewards)
        case SoftOverlongPenalty():
            penalty = soft_overlong(
                table.lengths,
                max_tokens=config.max_tokens,
                buffer_tokens=config.buffer_tokens,
                denominator_tokens=config.buffer_tokens if config.denominator == "l1" else config.max_tokens,
            )
            return penalty if config.applies_to == "all" else torch.where(table.is_correct, penalty, 0.0)
        case GroupRelativeLengthPenalty():
            return group_relative_overlong(
                table.lengths,
                table.is_correct,
                table.is_live,
                table.group_index,
                easy_threshold=config.easy_threshold,
                hard_penalty=length_penalties(config.hard_group_penalty, table),
                ramps_incorrect=config.correct_minority == "incorrect",
            )
