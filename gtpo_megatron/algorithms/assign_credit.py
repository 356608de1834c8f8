"""The facade of credit: from rewards and entropies to advantages, by the type of the configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.checks import (
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_rewards,
    check_shape,
    check_tensor,
)
from gtpo_megatron.algorithms.batch.outcome import is_correct
from gtpo_megatron.algorithms.batch.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.batch.response_table import ResponseTable, gather_table
from gtpo_megatron.algorithms.batch.tokens import Tokens
from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenInputs
from gtpo_megatron.algorithms.credit.diagnostics import credit_metrics
from gtpo_megatron.algorithms.credit.length_penalty import length_penalties
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.errors import ShapeError


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
        response_mask: ``[B, T]`` bool, in any arrangement: the tokens that the policy wrote. Position ``t`` counts
            these alone. A row without tokens gets zeros and is in no set and no pool.
        group_ids: ``[B]`` integer labels of prompt groups.
        old_logprobs: ``[B, T]`` nats; needed for ``weight_source="surprisal"`` and by STARE.
        shaping_mask: ``[B, T]`` bool; tokens where it is False (formatting, say) get the neutral share 1 and enter no
            comparison. GTPO and GRPO-S only.
        reduction: sums over ranks; None: all responses are here.

    Returns:
        Credit for this rank's rows; bit for bit the same for any order of the rows and any sharding of them over ranks.
        With geometric means that holds among machines with the same ``log`` and ``exp``, that is, of one kind.

    Raises:
        ShapeError: a shape or dtype does not fit.
        DataError: a value cannot be used. Both on all ranks alike.
    """
    reduction = reduction or LocalReduction()
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
        check_full_precision(token_entropy=token_entropy)
        if old_logprobs is not None:
            check_shape(shape, old_logprobs=old_logprobs)
            check_full_precision(old_logprobs=old_logprobs)
        if shaping_mask is not None and not algorithm.takes_shaping_mask:
            raise ShapeError(f"shaping_mask: {type(config).__name__} shapes nothing; pass None")
        tokens = Tokens.of(response_mask)
        inputs = TokenInputs(
            tokens=tokens,
            entropy=tokens.checked("token_entropy", token_entropy),
            old_logprobs=None if old_logprobs is None else -tokens.checked("old_logprobs", old_logprobs, sign=-1.0),
            compared=None if shaping_mask is None else tokens.pick(shaping_mask),
        )
        if algorithm.check is not None:
            algorithm.check(config, inputs, is_correct(rewards, success_threshold=config.success_threshold))
        local.append(inputs)
        return rewards, group_ids, tokens.lengths

    # what all ranks must agree on: a mask on some of them only would send them to different collectives
    given = f"shaping_mask={shaping_mask is not None} old_logprobs={old_logprobs is not None}"
    signature = f"credit {config!r} {given}"
    with torch.no_grad():
        table = gather_table(read, success_threshold=_threshold(config), reduction=reduction, signature=signature)
        tokens = local[0].tokens
        shaped_rewards, advantages, metrics = _earned(config, local.pop(), table, reduction)
        return Credit(shaped_rewards=tokens.put(shaped_rewards), advantages=tokens.put(advantages), metrics=metrics)


def _earned(
    config: AlgorithmConfig, inputs: TokenInputs, table: ResponseTable, reduction: Reduction
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Shaped rewards and advantages ``[N]``, and metrics; all else is freed before the padded results are made."""
    batch = CreditBatch(
        tokens=inputs.tokens,
        entropy=inputs.entropy,
        old_logprobs=inputs.old_logprobs,
        compared=inputs.compared,
        table=table,
        penalties=length_penalties(config.length_penalty, table),
        reduction=reduction,
    )
    earned = algorithm_of(config).credit(config, batch)
    return earned.shaped_rewards, earned.advantages, credit_metrics(earned, batch)


def _threshold(config: object) -> float:
    """Any number for what is no configuration: the ranks then raise alike, inside the gather."""
    return config.success_threshold if isinstance(config, AlgorithmConfig) else 0.0
