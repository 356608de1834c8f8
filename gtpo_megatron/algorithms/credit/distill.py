"""On-policy distillation: the teacher's log-prob of each token over the student's own."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.credit.gtpo import sets_along
from gtpo_megatron.algorithms.credit.shaping import entropy_weights
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import DistillConfig
from gtpo_megatron.errors import ShapeError

ENTROPY_FLOOR = 1e-8
"""Nats, added to every entropy, as GTPO's by default."""


def distill_credit(config: DistillConfig, batch: CreditBatch) -> Credit:
    """``A[i,t] = c_T w[i,t] (log pi_T(o_t) - log pi_old(o_t)) + c_r A_i``, ``A_i`` being GRPO's.

    With the defaults ``w = 1`` and ``c_r = 0``: minus the reverse KL of the sampled token, the advantage of Thinking
    Machines' "On-Policy Distillation" (2025). Its expectation under the student is ``-KL(pi_old || pi_T)`` of the
    position, and the policy gradient on average that of this KL, positions being taken as they were reached. With
    ``entropy_coef = e``: ``w = 1 - e + e x``, see ``student_weights``.

    Collectives: those of ``student_weights`` with ``entropy_coef``.
    """
    assert batch.teacher_logprobs is not None
    assert batch.old_logprobs is not None
    teacher = config.teacher_coef * (batch.teacher_logprobs - batch.old_logprobs)
    if config.entropy_coef:
        teacher *= 1 - config.entropy_coef + config.entropy_coef * student_weights(config, batch)
    if not config.reward_coef:
        return Credit(shaped_rewards=teacher, advantages=teacher)
    rewarded = group_relative_credit(config, batch)
    return Credit(
        shaped_rewards=teacher + config.reward_coef * rewarded.shaped_rewards,
        advantages=teacher + config.reward_coef * rewarded.advantages,
    )


def student_weights(config: DistillConfig, batch: CreditBatch) -> Tensor:
    """``x[i,t] = H[i,t] / mean of H`` over the tokens that it is compared with, ``[N]``: GTPO's weight on O+ [I 3].

    All responses of a group are on one side: where the teacher is, no response is right or wrong. The mean of ``x``
    over the tokens compared is 1, so the whole of the credit's weights stays what it is.

    Collectives: those of ``sets_along`` and ``entropy_weights``.
    """
    peer_set, num_peers = sets_along(config.entropy_axis, batch.table.scopes(spans_batch=False), batch)
    return entropy_weights(
        batch.entropy + ENTROPY_FLOOR,
        torch.ones_like(batch.row, dtype=torch.bool),
        peer_set,
        num_peers,
        "arithmetic",
        shaped_tokens=None,
        reduction=batch.reduction,
    )


def check_teacher(config: DistillConfig, batch: CreditBatch) -> None:
    """Checks that the teacher's and the student's log-probs were given.

    Raises:
        ShapeError: they were not.
    """
    for name in ("teacher_logprobs", "old_logprobs"):
        if getattr(batch, name) is None:
            raise ShapeError(f"{name}: got None, needed for {type(config).__name__}")
