"""(7)(8) The optimizer updates of one rollout batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.experts.balance import ExpertBalance
from gtpo_megatron.actor.experts.routing_replay import RoutingReplay
from gtpo_megatron.actor.forward_backward import MicroBatching, run_micro_batches
from gtpo_megatron.actor.optimizer_step import OptimizerStep
from gtpo_megatron.actor.policy_head import PolicyHead, to_rows
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.algorithms import prepare_update, update_loss
from gtpo_megatron.algorithms.losses.loss_batch import LossTerms, SumCount, UpdateBatch
from gtpo_megatron.algorithms.prepare_update import off_policy_statistics
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.batch import RolloutShard, TrainBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.data.sharding import updates_of_step
from gtpo_megatron.distributed.advantage_reducer import reduction_over
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Sum, merge, to_scalars

Metrics = dict[str, Metric]


class PolicyUpdate:
    """Makes a step's updates; what is batch-wide is computed before micro-batches are cut.

    Attributes:
        trainer_logprobs: ``[B, T]`` nats, of the responses of the last update without a scoring pass; None on a rank
            without logits, and with a scoring pass.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Any],
        optimizer_step: OptimizerStep,
        head: PolicyHead,
        micro_batching: MicroBatching,
        balance: ExpertBalance,
        replay: RoutingReplay | None,
        stages: StageReport,
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._optimizer_step = optimizer_step
        self._head = head
        self._stages = stages
        self._groups = head.groups
        self._micro_batching = micro_batching
        self._balance = balance
        self._replay = replay
        self._has_scoring_pass = config.rollout.entropy_source == "actor"
        algorithm = algorithm_of(config.algorithm)
        self._are_together = (
            algorithm.ratio_of == "response" or algorithm.reads_neighbours or not self._has_scoring_pass
        )
        self.trainer_logprobs: Tensor | None = None

    def run(self, batch: RolloutShard, *, step: int) -> Metrics:
        """All updates of a step.

        Args:
            batch: this rank's responses; a ``TrainBatch`` on ranks with logits.
            step: number of the step; fixes the order of mini-batches.

        Returns:
            Metrics of this rank's tokens, summed over the updates; gradient norm and learning rate of the last one.

        Collectives: Megatron's over tp, pp and dp; two small reductions over dp per update;
            those of ``ExpertBalance``.
        """
        if not self._has_scoring_pass and isinstance(batch, TrainBatch):
            self.trainer_logprobs = torch.zeros(batch.rollouts.response_ids.shape)
        pairs = []
        for groups in updates_of_step(self._config, batch.prompt_groups, step=step):
            chosen = set(groups)
            rows = [row for row, group in enumerate(batch.rollouts.group_ids.tolist()) if group in chosen]
            pairs.append(self._one_update(batch, rows))
        # the last update's gradient norm and learning rate stand, losses are averaged, everything else adds up
        reports = [report for report, _ in pairs]
        last = {name: reports[-1][name] for name in ("optimizer/grad_norm", "optimizer/learning_rate")}
        loss = Sum(sum(loss for _, loss in pairs) / len(pairs))
        # every replica reports the same skips: a maximum over ranks, a sum over updates
        skipped = Max(sum(to_scalars(report)["optimizer/skipped_count"] for report in reports))
        return merge(reports) | last | {"policy/loss": loss, "optimizer/skipped_count": skipped}

    def _one_update(self, batch: RolloutShard, rows: Sequence[int]) -> tuple[Metrics, float]:
        """One update from some rows; its metrics, and this rank's part of the loss."""
        with self._stages.stage("prepare"):
            prepared = self._prepare(batch, rows)
            # a batch without a single token in the loss has loss 0 whatever it is divided by
            denominator = 1.0 if prepared is None else float(prepared.denominator) or 1.0
            self._balance.set_penalties(batch.rollouts, rows)
            self._balance.begin(with_grad=True)
        place = {row: i for i, row in enumerate(rows)}
        compared: list[tuple[tuple[Tensor, Tensor], Tensor]] = []

        def loss(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, LossTerms]:
            # what is returned stays on the device: reading it here would keep the host from launching backward
            assert prepared is not None
            width = int(batch.rollouts.response_lengths[list(micro.rows)].max()) if micro.rows else 0
            token_logprobs = self._head.score(hidden, micro).logprobs
            logprobs = to_rows(token_logprobs, micro, num_columns=width)
            chosen = prepared.select([place[row] for row in micro.rows], width)
            if batch.rollouts.branches and not self._are_together:  # other micro-batches have the rest
                is_here = to_rows(torch.ones(len(micro.token_rows)), micro, num_columns=width) > 0
                chosen = replace(chosen, response_mask=chosen.response_mask & is_here.to(logprobs.device))
            statistics: dict[str, SumCount] = {}
            if not self._has_scoring_pass:
                # on policy: the weights have not moved since the responses were sampled
                chosen = replace(chosen, old_logprobs=logprobs.detach())
                index = torch.tensor(micro.rows, dtype=torch.int64)
                sampled = batch.rollouts.rollout_logprobs[index, :width].to(logprobs.device, non_blocking=True)
                statistics = off_policy_statistics(
                    self._config.algorithm.off_policy, logprobs.detach(), sampled, chosen.response_mask
                )
                compared.append(((index[micro.token_rows], micro.token_columns), token_logprobs.detach()))
            terms = update_loss(self._config.algorithm, logprobs, chosen)
            loss = terms.loss_sum / denominator
            return loss, replace(terms, loss_sum=loss.detach(), statistics=statistics | terms.statistics)

        with self._stages.stage("forward_backward"):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer_step.zero_grad()
            batches = self._micro_batching.cut(batch.rollouts, rows, are_together=self._are_together)
            if self._replay is not None:
                self._replay.begin_update(batches)
            kept = run_micro_batches(self._chunks, batches, loss, forward_only=False)
            if self._replay is not None:
                self._replay.end_update()
        self._stages.add_work("update", batch.rollouts, rows, batches, with_backward=True)
        with self._stages.stage("optimizer"):
            metrics = self._optimizer_step.apply()
            if metrics["optimizer/skipped_count"] == Max(0.0):
                self._balance.move_biases()
        if not self._has_scoring_pass:
            metrics |= self._balance.end()
        if prepared is not None and self._has_scoring_pass:
            metrics |= _as_means(prepared.statistics)
        of_micro_batches = [_as_means(terms.statistics) for terms in kept]
        of_micro_batches += [self._gap(batch, places, token_logprobs) for places, token_logprobs in compared]
        return merge([metrics, *of_micro_batches]), sum(float(terms.loss_sum) for terms in kept)

    def _prepare(self, batch: RolloutShard, rows: Sequence[int]) -> UpdateBatch | None:
        """Computes what the loss needs of the whole mini-batch; None on a rank without logits."""
        if not isinstance(batch, TrainBatch):
            return None
        index = torch.tensor(list(rows), dtype=torch.int64)
        mask = batch.loss_mask[index]
        return prepare_update(
            self._config.algorithm,
            # a row that takes no part in the loss has no advantage either
            advantages=torch.where(mask, batch.advantages[index], 0.0),
            token_entropy=batch.token_entropy[index],
            response_mask=mask,
            group_ids=batch.rollouts.group_ids[index],
            old_logprobs=batch.old_logprobs[index],
            # without a scoring pass the old log-probs here are the sampler's too; the forward pass compares
            rollout_logprobs=batch.rollouts.rollout_logprobs[index],
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[index],
            reduction=reduction_over(self._groups.dp),
        ).to(self._head.model.output_weight().device)

    def _gap(self, batch: RolloutShard, places: tuple[Tensor, Tensor], token_logprobs: Tensor) -> Metrics:
        """How far the sampler's log-probs are from the trainer's before its update, which a scoring pass would say.

        Waits for the device.
        """
        assert self.trainer_logprobs is not None
        token_logprobs = token_logprobs.cpu()
        self.trainer_logprobs[places] = token_logprobs
        return gap_metrics(token_logprobs, batch.rollouts.rollout_logprobs[places])


def _as_means(statistics: dict[str, SumCount]) -> Metrics:
    return {name: Mean(float(value.total), float(value.count)) for name, value in statistics.items()}
