"""Supervised fine-tuning on a rank: an optimizer update from given conversations, and their held-out loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.experts.balance import ExpertBalance
from gtpo_megatron.actor.forward_backward import MicroBatching, run_micro_batches
from gtpo_megatron.actor.optimizer_step import OptimizerStep
from gtpo_megatron.actor.policy_head import PolicyHead
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.algorithms.losses.nll import nll_statistic, nll_sum
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.observability.metrics import Mean, Metric

Metrics = dict[str, Metric]


class SupervisedUpdate:
    """Makes updates whose loss is the mean of ``-log pi`` over the trained tokens of the whole batch.

    The number of tokens comes with the batch, so that neither micro-batches nor ranks change what is divided by, and
    no rank has to ask the others.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer_step: OptimizerStep,
        head: PolicyHead,
        micro_batching: MicroBatching,
        balance: ExpertBalance,
        stages: StageReport,
    ) -> None:
        self._chunks = chunks
        self._optimizer_step = optimizer_step
        self._head = head
        self._micro_batching = micro_batching
        self._balance = balance
        self._stages = stages

    def run(self, batch: RolloutBatch, *, num_tokens: int, step: int) -> Metrics:
        """One update.

        Args:
            batch: conversations of this replica; the tokens of ``loss_mask`` are trained.
            num_tokens: trained tokens of all replicas together.
            step: number of the step.

        Returns:
            ``sft/loss`` of this replica's tokens, gradient norm and learning rate, and costs.

        Raises:
            NumericsError: as :meth:`OptimizerStep.apply`.

        Collectives: Megatron's over tp, cp, pp and dp, with experts over ep and one sum over the world.
        """
        self._stages.step_begins(step)
        self._balance.begin(with_grad=True)

        def loss(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, tuple[Tensor, int]]:
            logprobs = self._head.score(hidden, micro).logprobs
            # what is kept stays on the device: reading it here would keep the host from launching backward
            return nll_sum(logprobs) / num_tokens, (nll_statistic(logprobs), len(micro.token_rows))

        rows = range(batch.num_responses)
        with self._stages.stage("forward_backward"):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer_step.zero_grad()
            batches = self._micro_batching.cut(batch, rows)
            kept = run_micro_batches(self._chunks, batches, loss, forward_only=False)
        self._stages.add_work("update", batch, rows, batches, with_backward=True)
        with self._stages.stage("optimizer"):
            metrics = self._optimizer_step.apply()
        return metrics | self._balance.end() | {"sft/loss": _mean(kept)} | self._stages.take()

    def measure(self, batch: RolloutBatch) -> Metrics:
        """``sft/heldout_loss`` of this replica's tokens, by the weights at hand; nothing is changed.

        Collectives: Megatron's over tp, cp and pp, with experts also over ep.
        """

        def keep(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, tuple[Tensor, int]]:
            logprobs = self._head.score(hidden, micro).logprobs
            return torch.zeros([], device=hidden.device), (nll_statistic(logprobs), len(micro.token_rows))

        batches = self._micro_batching.cut(batch, range(batch.num_responses))
        return {"sft/heldout_loss": _mean(run_micro_batches(self._chunks, batches, keep, forward_only=True))}


def _mean(kept: Sequence[tuple[Tensor, int]]) -> Mean:
    return Mean(sum(float(total) for total, _ in kept), float(sum(count for _, count in kept)))
