"""Computes advantages from rewards and entropies with the algorithm that the configuration selects."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_rewards,
    check_shape,
    check_tensor,
    checked_tokens,
)
from gtpo_megatron.algorithms.credit.diagnostics import credit_metrics
from gtpo_megatron.algorithms.credit.length_penalty import length_penalties
from gtpo_megatron.algorithms.credit.reference_kl import checked_reference, reference_penalties
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import (
    CreditBatch,
    TokenInputs,
    Tokens,
    gather_table,
    is_correct,
)
from gtpo_megatron.batch import Credit, fields_of
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.config.algorithm.base import NoLengthPenalty
from gtpo_megatron.errors import ShapeError


def assign_credit(  # noqa: PLR0913 - tensors of the same rows
    config: AlgorithmConfig,
    *,
    rewards: Tensor,
    token_entropy: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    shaping_mask: Tensor | None = None,
    turn_rewards: Sequence[Sequence[float]] | None = None,
    truncated: Tensor | None = None,
    reduction: Reduction | None = None,
) -> Credit:
    """Computes the advantage of every response token.

    Args:
        config: its type selects the algorithm.
        rewards: ``[B]`` any real dtype, raw outcome rewards; converted to float64.
        token_entropy: ``[B, T]`` float32 or float64, nats over the full vocabulary of the old policy; bf16 is refused.
        response_mask: ``[B, T]`` bool, in any arrangement: the tokens that the policy wrote. Position ``t`` counts
            only these. A row without tokens gets zeros and is in no set and no pool.
        group_ids: ``[B]`` integer labels of prompt groups.
        old_logprobs: ``[B, T]`` nats; needed for ``weight_source="surprisal"``, by STARE, and beside ``ref_logprobs``.
        ref_logprobs: ``[B, T]`` nats, of the reference policy; needed for ``reference_kl`` in the reward.
        shaping_mask: ``[B, T]`` bool; tokens where it is False (such as formatting) get the neutral entropy weight 1
            and are not compared. GTPO and GRPO-S only.
        turn_rewards: of each of the ``B`` responses, what its turns earned, a turn being a stretch of the policy's own
            tokens; needed for ``turn_reward_coef``.
        truncated: ``[B]`` bool: a limit has cut the response, for the length penalty; None: none was cut.
        reduction: sums over ranks; None: this process holds all responses.

    Returns:
        Credit for this rank's rows; bit for bit the same for any order of the rows and any sharding over ranks. With
        geometric means this requires machines with the same ``log`` and ``exp``.

    Raises:
        ShapeError: a shape or dtype does not fit.
        DataError: a value cannot be used. Both errors are raised on all ranks.
    """
    reduction = reduction or Reduction()
    local: list[TokenInputs] = []

    def read() -> tuple[Tensor, Tensor, Tensor]:
        algorithm = algorithm_of(config)
        check_tensor(rewards=rewards, token_entropy=token_entropy, response_mask=response_mask, group_ids=group_ids)
        check_num_dims(2, token_entropy=token_entropy)
        shape = tuple(token_entropy.shape)
        check_shape(shape[:1], rewards=rewards, group_ids=group_ids)
        check_rewards(rewards)
        check_labels(group_ids=group_ids)
        masks = {"response_mask": response_mask, "shaping_mask": shaping_mask}
        for name, mask in masks.items():
            if mask is not None:
                check_shape(shape, **{name: mask})
                check_mask(**{name: mask})
        if truncated is not None:
            check_shape(shape[:1], truncated=truncated)
            check_mask(truncated=truncated)
        check_full_precision(token_entropy=token_entropy)
        if old_logprobs is not None:
            check_shape(shape, old_logprobs=old_logprobs)
            check_full_precision(old_logprobs=old_logprobs)
        if shaping_mask is not None and not algorithm.takes_shaping_mask:
            raise ShapeError(f"shaping_mask: {type(config).__name__} shapes nothing; pass None")
        tokens = Tokens.of(response_mask)
        old = None if old_logprobs is None else -checked_tokens(tokens, "old_logprobs", old_logprobs, sign=-1.0)
        kl = config.reference_kl
        inputs = TokenInputs(
            tokens=tokens,
            entropy=checked_tokens(tokens, "token_entropy", token_entropy),
            old_logprobs=old,
            ref_logprobs=checked_reference(kl, ref_logprobs, tokens) if kl.in_reward else None,
            compared=None if shaping_mask is None else tokens.pick(shaping_mask),
            turn_rewards=turn_rewards,
        )
        if kl.in_reward and old_logprobs is None:
            raise ShapeError("old_logprobs: got None, needed for reference_kl in the reward")
        if algorithm.check is not None:
            algorithm.check(config, inputs, is_correct(rewards, success_threshold=config.success_threshold))
        local.append(inputs)
        return rewards, group_ids, tokens.lengths

    # all ranks must agree on this: a mask on some of them only would make them call different collectives
    given = {
        "shaping_mask": shaping_mask,
        "old_logprobs": old_logprobs,
        "turn_rewards": turn_rewards,
        "truncated": truncated,
    }
    signature = f"credit {config!r} {[name for name, value in given.items() if value is not None]}"
    with torch.no_grad():
        table = gather_table(read, success_threshold=_threshold(config), reduction=reduction, signature=signature)
        (inputs,) = local
        penalties = length_penalties(config.length_penalty, table, _gathered_cuts(config, truncated, reduction))
        if config.reference_kl.in_reward:
            penalties = penalties + reference_penalties(config.reference_kl, inputs, reduction)
        batch = CreditBatch(**fields_of(inputs), table=table, penalties=penalties, reduction=reduction)
        credit = algorithm_of(config).credit(config, batch)
        metrics = credit_metrics(credit, batch)  # first: what it needs is freed before the padded results are made
        return Credit(
            shaped_rewards=inputs.tokens.put(credit.shaped_rewards),
            advantages=inputs.tokens.put(credit.advantages),
            metrics=metrics,
        )


def _threshold(config: object) -> float:
    """The threshold, or 0 if ``config`` has a wrong type: the gather then raises on all ranks."""
    return config.success_threshold if isinstance(config, AlgorithmConfig) else 0.0


def _gathered_cuts(config: AlgorithmConfig, truncated: Tensor | None, reduction: Reduction) -> Tensor | None:
    """``[R]`` bool, which of all responses a limit has cut; None if nobody knows, or no penalty asks.

    Collectives: one gather, where a penalty asks.
    """
    if truncated is None or isinstance(config.length_penalty, NoLengthPenalty):
        return None
    return reduction.gather_values(truncated.to(torch.float64)) > 0
