"""Computes advantages from rewards and entropies with the algorithm that the configuration selects."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import (
    check_branches,
    check_full_precision,
    check_labels,
    check_mask,
    check_num_dims,
    check_rewards,
    check_shape,
    check_tensor,
    flatten,
    flatten_entropies,
    flatten_logprobs,
)
from gtpo_megatron.algorithms.credit.diagnostics import credit_metrics
from gtpo_megatron.algorithms.credit.length_penalty import length_penalties
from gtpo_megatron.algorithms.credit.reference_kl import check_reference, reference_penalties
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import CreditBatch, ResponseTable, own_lengths, table_rows
from gtpo_megatron.batch import Credit
from gtpo_megatron.branches import Branch
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
    teacher_logprobs: Tensor | None = None,
    shaped_tokens: Tensor | None = None,
    turn_rewards: Sequence[Sequence[float]] | None = None,
    branches: Sequence[Sequence[Branch]] | None = None,
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
        old_logprobs: ``[B, T]`` nats; needed by STARE, and beside ``ref_logprobs`` and ``teacher_logprobs``.
        ref_logprobs: ``[B, T]`` nats, of the reference policy; needed for ``reference_kl`` in the reward.
        teacher_logprobs: ``[B, T]`` nats, of the teacher; needed for distillation.
        shaped_tokens: ``[B, T]`` bool; tokens where it is False (such as formatting) get the neutral entropy weight 1
            and are not compared. GTPO and GRPO-S only.
        turn_rewards: rewards of the turns of each of the ``B`` responses, a turn being a stretch of the policy's own
            tokens, in the order in which they were sampled; needed for ``turn_reward_coef``.
        branches: of each of the ``B`` responses, where its tokens do not follow those before them; None on all ranks or
            on none: no response has a branch.
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

    def read_rows() -> Tensor:
        algorithm = algorithm_of(config)
        check_tensor(rewards=rewards, token_entropy=token_entropy, response_mask=response_mask, group_ids=group_ids)
        check_num_dims(2, token_entropy=token_entropy)
        shape = tuple(token_entropy.shape)
        check_shape(shape[:1], rewards=rewards, group_ids=group_ids)
        check_rewards(rewards)
        check_labels(group_ids=group_ids)
        masks = {"response_mask": response_mask, "shaped_tokens": shaped_tokens}
        for name, mask in masks.items():
            if mask is not None:
                check_shape(shape, **{name: mask})
                check_mask(**{name: mask})
        if truncated is not None:
            check_shape(shape[:1], truncated=truncated)
            check_mask(truncated=truncated)
        check_full_precision(token_entropy=token_entropy)
        _check_given(shape, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
        if old_logprobs is None and config.reference_kl.in_reward:
            raise ShapeError("old_logprobs: got None, needed for reference_kl in the reward")
        if shaped_tokens is not None and not algorithm.takes_shaped_tokens:
            raise ShapeError(f"shaped_tokens: {type(config).__name__} shapes nothing; pass None")
        check_branches(branches, shape)
        lengths = own_lengths(response_mask)
        return table_rows(rewards, group_ids, lengths, success_threshold=config.success_threshold)

    def read_tokens(table: ResponseTable) -> CreditBatch:
        algorithm, kl = algorithm_of(config), config.reference_kl
        batch = CreditBatch.of(
            response_mask,
            table,
            entropy=flatten_entropies(response_mask, token_entropy),
            old_logprobs=_flat_given(response_mask, old_logprobs=old_logprobs),
            ref_logprobs=check_reference(kl, ref_logprobs, response_mask) if kl.in_reward else None,
            teacher_logprobs=_flat_given(response_mask, teacher_logprobs=teacher_logprobs),
            shaped_tokens=None if shaped_tokens is None else flatten(response_mask, shaped_tokens),
            turn_rewards=turn_rewards,
            branches=branches,
            reduction=reduction,
        )
        if algorithm.check is not None:
            algorithm.check(config, batch)
        return batch

    # all ranks must agree on this: a mask on some of them only would make them call different collectives
    optional = {
        "shaped_tokens": shaped_tokens,
        "old_logprobs": old_logprobs,
        "teacher_logprobs": teacher_logprobs,
        "turn_rewards": turn_rewards,
        "branches": branches,
        "truncated": truncated,
    }
    signature = f"credit {config!r} {[name for name, value in optional.items() if value is not None]}"
    with torch.no_grad():
        table = ResponseTable.of(*reduction.gather(reduction.agree(read_rows, signature)))
        batch = reduction.agree(lambda: read_tokens(table))
        batch = replace(batch, penalties=_penalties(config, batch, truncated))
        credit = algorithm_of(config).credit(config, batch)
        metrics = credit_metrics(credit, batch)  # first: what it needs is freed before the padded results are made
        return Credit(
            shaped_rewards=batch.padded(credit.shaped_rewards),
            advantages=batch.padded(credit.advantages),
            metrics=metrics | credit.metrics,
        )


def _check_given(shape: tuple[int, ...], **logprobs: Tensor | None) -> None:
    """Checks shape and dtype of those that are not None."""
    for name, matrix in logprobs.items():
        if matrix is not None:
            check_shape(shape, **{name: matrix})
            check_full_precision(**{name: matrix})


def _flat_given(mask: Tensor, **logprobs: Tensor | None) -> Tensor | None:
    """``flatten_logprobs`` of one matrix; None if it is None."""
    ((name, matrix),) = logprobs.items()
    return None if matrix is None else flatten_logprobs(mask, **{name: matrix})


def _penalties(config: AlgorithmConfig, batch: CreditBatch, truncated: Tensor | None) -> Tensor:
    """``[R]`` float64, for the length of each response and for its divergence from the reference policy.

    Collectives: one gather for each of the two that the configuration has, and one more if responses may branch.
    """
    is_cut = None
    if truncated is not None and not isinstance(config.length_penalty, NoLengthPenalty):
        is_cut = batch.reduction.gather(truncated.to(torch.int64))[0] > 0
    penalties = length_penalties(config.length_penalty, _longest_paths(config, batch), is_cut)
    if config.reference_kl.in_reward:
        penalties = penalties + reference_penalties(config.reference_kl, batch)
    return penalties


def _longest_paths(config: AlgorithmConfig, batch: CreditBatch) -> ResponseTable:
    """The table with the longest path of each response as its length, since a limit is one of a sequence."""
    if batch.branches is None or isinstance(config.length_penalty, NoLengthPenalty):
        return batch.table
    longest = torch.zeros_like(batch.lengths)
    longest.scatter_reduce_(0, batch.row.to(torch.int64).cpu(), batch.position.cpu() + 1, "amax")
    return replace(batch.table, lengths=batch.reduction.gather(longest)[0])
