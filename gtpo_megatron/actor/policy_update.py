"""(7)(8) The optimizer updates of one rollout batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.experts.balance import ExpertBalance
from gtpo_megatron.actor.experts.routing_replay import RoutingReplay
from gtpo_megatron.actor.forward_backward import run_micro_batches
from gtpo_megatron.actor.loss_adapter import PolicyHead, to_rows
from gtpo_megatron.actor.micro_batching import MicroBatching
from gtpo_megatron.actor.optimizer_step import OptimizerStep
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.algorithms.losses.loss_inputs import UpdateBatch
from gtpo_megatron.algorithms.losses.loss_terms import SumCount
from gtpo_megatron.algorithms.policy_loss import update_loss
from gtpo_megatron.algorithms.prepare_update import off_policy_statistics
from gtpo_megatron.batch import RolloutBatch, TrainBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.data.sharding import mini_batch_groups
from gtpo_megatron.distributed.advantage_reducer import prepare_update
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Sum, merge, to_scalars

Metrics = dict[str, Metric]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptMicroBatch:
    """Results of a micro-batch, on the device: reading them there would keep the host from launching backward.

    Attributes:
        loss: scalar, its part of the loss.
        statistics: of its tokens.
        places: row and column of its response tokens in the rank's batch; None with a scoring pass.
        token_logprobs: ``[R]`` nats, theirs; None with a scoring pass.
    """

    loss: Tensor
    statistics: dict[str, SumCount]
    places: tuple[Tensor, Tensor] | None = None
    token_logprobs: Tensor | None = None


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
        self.trainer_logprobs: Tensor | None = None

    def run(self, batch: TrainBatch, *, step: int) -> Metrics:
        """All updates of a step.

        Args:
            batch: this rank's responses with their credit.
            step: number of the step; fixes the order of mini-batches.

        Returns:
            Metrics of this rank's tokens, summed over the updates; gradient norm and learning rate of the last one.

        Collectives: Megatron's over tp, pp and dp; two small reductions over dp per update;
            those of ``ExpertBalance``.
        """
        if not self._has_scoring_pass and batch.credit is not None:
            self.trainer_logprobs = torch.zeros(batch.scored.shard.rollouts.response_ids.shape)
        pairs = []
        for groups in mini_batch_groups(
            batch.scored.shard.prompt_groups,
            mini_batch_prompts=self._config.update.mini_batch_prompts,
            num_updates=self._config.update.updates_per_rollout,
            seed=self._config.seed,
            step=step,
        ):
            chosen = set(groups)
            rows = [row for row, group in enumerate(batch.scored.shard.rollouts.group_ids.tolist()) if group in chosen]
            pairs.append(self._one_update(batch, rows))
        # the last update's gradient norm and learning rate stand, losses are averaged, everything else adds up
        reports = [report for report, _ in pairs]
        last = {name: reports[-1][name] for name in ("optimizer/grad_norm", "optimizer/learning_rate")}
        loss = Sum(sum(loss for _, loss in pairs) / len(pairs))
        # every replica reports the same skips: a maximum over ranks, a sum over updates
        skipped = Max(sum(to_scalars(report)["optimizer/skipped_count"] for report in reports))
        return merge(reports) | last | {"policy/loss": loss, "optimizer/skipped_count": skipped}

    def _one_update(self, batch: TrainBatch, rows: Sequence[int]) -> tuple[Metrics, float]:
        """One update from some rows; its metrics, and this rank's part of the loss."""
        with self._stages.stage("prepare"):
            prepared = self._prepare(batch, rows)
            # a batch without a single token in the loss has loss 0 whatever it is divided by
            weight = 1.0 if prepared is None else float(prepared.weight) or 1.0
            self._balance.set_penalties(batch.scored.shard.rollouts, rows)
            self._balance.begin(with_grad=True)
        place = {row: i for i, row in enumerate(rows)}

        def loss(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, KeptMicroBatch]:
            assert prepared is not None
            width = int(batch.scored.shard.rollouts.response_lengths[list(micro.rows)].max()) if micro.rows else 0
            token_logprobs = self._head.score(hidden, micro).logprobs
            logprobs = to_rows(token_logprobs, micro, num_columns=width)
            chosen = prepared.rows([place[row] for row in micro.rows], width)
            beside_sampler: dict[str, Any] = {}
            statistics: dict[str, SumCount] = {}
            if not self._has_scoring_pass:
                # on policy: the weights have not moved since the responses were sampled
                chosen = replace(chosen, old_logprobs=logprobs.detach())
                rollouts, mask = batch.scored.shard.rollouts, chosen.response_mask
                index = torch.tensor(micro.rows, dtype=torch.int64)
                sampled = rollouts.rollout_logprobs[index, :width].to(logprobs.device, non_blocking=True)
                statistics = off_policy_statistics(self._config.algorithm.off_policy, logprobs.detach(), sampled, mask)
                beside_sampler = {
                    "places": (index[micro.token_rows], micro.token_columns),
                    "token_logprobs": token_logprobs.detach(),
                }
            terms = update_loss(self._config.algorithm, logprobs, chosen)
            loss = terms.loss_sum / weight
            return loss, KeptMicroBatch(loss=loss.detach(), statistics=statistics | terms.statistics, **beside_sampler)

        with self._stages.stage("forward_backward"):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer_step.zero_grad()
            batches = self._micro_batching.cut(batch.scored.shard.rollouts, rows)
            if self._replay is not None:
                self._replay.begin_update(batches)
            kept = run_micro_batches(self._chunks, batches, loss, forward_only=False)
            if self._replay is not None:
                self._replay.end_update()
        self._stages.add_work("update", batch.scored.shard.rollouts, rows, with_backward=True)
        with self._stages.stage("optimizer"):
            metrics = self._optimizer_step.apply()
            if metrics["optimizer/skipped_count"] == Max(0.0):
                self._balance.move_biases()
        if not self._has_scoring_pass:
            metrics |= self._balance.end()
        if prepared is not None and self._has_scoring_pass:
            metrics |= _as_means(prepared.statistics)
        of_micro_batches = [self._metrics(one, batch.scored.shard.rollouts) for one in kept]
        return merge([metrics, *of_micro_batches]), sum(float(one.loss) for one in kept)

    def _prepare(self, batch: TrainBatch, rows: Sequence[int]) -> UpdateBatch | None:
        """Computes what the loss needs of the whole mini-batch; None on a rank without logits."""
        if batch.credit is None or batch.scored.scores is None:
            return None
        index = torch.tensor(list(rows), dtype=torch.int64)
        credit, scores, rollouts = batch.credit, batch.scored.scores, batch.scored.shard.rollouts
        mask = batch.loss_mask[index]
        return prepare_update(
            self._config.algorithm,
            # a row that takes no part in the loss has no advantage either
            advantages=torch.where(mask, credit.advantages[index], 0.0),
            token_entropy=scores.token_entropy[index],
            response_mask=mask,
            group_ids=rollouts.group_ids[index],
            old_logprobs=scores.old_logprobs[index],
            # without a scoring pass the old log-probs here are the sampler's too; the forward pass compares
            rollout_logprobs=rollouts.rollout_logprobs[index],
            ref_logprobs=None if scores.ref_logprobs is None else scores.ref_logprobs[index],
            dp_group=self._groups.dp,
        ).to(self._head.model.output_weight().device)

    def _metrics(self, kept: KeptMicroBatch, rollouts: RolloutBatch) -> Metrics:
        """A micro-batch's metrics on the host; waits for the device.

        Without a scoring pass also how far the sampler's log-probs are from the trainer's before its update, which a
        scoring pass would say.
        """
        metrics = _as_means(kept.statistics)
        if kept.token_logprobs is None or kept.places is None:
            return metrics
        assert self.trainer_logprobs is not None
        token_logprobs = kept.token_logprobs.cpu()
        self.trainer_logprobs[kept.places] = token_logprobs
        return gap_metrics(token_logprobs, rollouts.rollout_logprobs[kept.places]) | metrics


def _as_means(statistics: dict[str, SumCount]) -> Metrics:
    return {name: Mean(float(value.total), float(value.count)) for name, value in statistics.items()}
