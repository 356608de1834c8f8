"""(7)(8) The optimizer updates of one rollout batch."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.forward_backward import run_micro_batches
from gtpo_megatron.actor.loss_adapter import PolicyHead, to_rows
from gtpo_megatron.actor.place import RankPlace
from gtpo_megatron.actor.score_metrics import gap_metrics
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.algorithms.assign_credit import Credit
from gtpo_megatron.algorithms.losses.loss_terms import SumCount
from gtpo_megatron.algorithms.policy_loss import policy_loss
from gtpo_megatron.algorithms.prepare_update import UpdateTensors, off_policy_statistics
from gtpo_megatron.batch import RolloutBatch, TrainBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.mini_batches import mini_batch_groups
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches
from gtpo_megatron.distributed.advantage_reducer import prepare_update
from gtpo_megatron.errors import NumericsError
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Sum, merge, to_scalars

logger = logging.getLogger(__name__)

Metrics = dict[str, Metric]


class PolicyUpdate:
    """Makes a step's updates; what is batch-wide is computed before micro-batches are cut.

    Attributes:
        num_updates: optimizer updates made so far in the run, skipped ones included.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[Any],
        optimizer: Any,
        schedule: Any,
        head: PolicyHead,
        place: RankPlace,
        stages: StageReport,
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._optimizer = optimizer
        self._schedule = schedule
        self._head = head
        self._stages = stages
        self._groups = head.groups
        self._pack_layout = PackLayout.of(config.parallel, place.context_index)
        self._has_scoring_pass = config.rollout.entropy_source == "actor"
        self.num_updates = 0
        self._skipped_in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """The counters, for a checkpoint."""
        return {"num_updates": self.num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on counting where ``state`` was taken."""
        self.num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]

    def run(self, batch: TrainBatch, *, step: int) -> Metrics:
        """All updates of a step.

        Args:
            batch: this rank's responses with their credit.
            step: number of the step; fixes the order of mini-batches.

        Returns:
            Metrics of this rank's tokens, summed over the updates; gradient norm and learning rate of the last one.

        Collectives: Megatron's over tp, pp and dp; two small reductions over dp an update.
        """
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
        place = {row: i for i, row in enumerate(rows)}

        def loss(hidden: Tensor, micro: PackedMicroBatch) -> tuple[Tensor, tuple[float, Metrics]]:
            assert prepared is not None
            width = int(batch.scored.shard.rollouts.response_lengths[list(micro.rows)].max()) if micro.rows else 0
            token_logprobs = self._head.score(hidden, micro).logprobs
            logprobs = to_rows(token_logprobs, micro, num_columns=width)
            arguments = prepared.rows([place[row] for row in micro.rows], width)
            metrics: Metrics = {}
            if not self._has_scoring_pass:
                # on policy: the weights have not moved since the responses were sampled
                arguments["old_logprobs"] = logprobs.detach()
                metrics = self._sampler_metrics(
                    batch.scored.shard.rollouts,
                    micro,
                    token_logprobs.detach(),
                    logprobs.detach(),
                    arguments["response_mask"],
                )
            terms = policy_loss(self._config.algorithm, logprobs=logprobs, **arguments)
            share = terms.loss_sum / weight
            return share, (float(share.detach()), metrics | _as_means(terms.statistics))

        with self._stages.stage("forward_backward"):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            kept = run_micro_batches(
                self._chunks,
                micro_batches(
                    batch.scored.shard.rollouts,
                    rows,
                    budget_tokens=self._config.update.micro_batch_tokens,
                    layout=self._pack_layout,
                ),
                loss,
                forward_only=False,
            )
        self._stages.add_work("update", batch.scored.shard.rollouts, rows, with_backward=True)
        with self._stages.stage("optimizer"):
            metrics = self._optimizer_step()
        if prepared is not None and self._has_scoring_pass:
            metrics |= _as_means(prepared.statistics)
        return merge([metrics, *(one for _, one in kept)]), sum(share for share, _ in kept)

    def _optimizer_step(self) -> Metrics:
        """Applies the gradients that lie in Megatron's buffers, unless they are not finite.

        Megatron's float32 optimizer does not look: one NaN would be in every weight after the step. The norm is over
        all ranks, so all of them skip alike.

        Raises:
            NumericsError: too many skips in a row.

        Collectives: Megatron's over the model-parallel ranks, for the norm.
        """
        self.num_updates += 1
        self._schedule.step(1)
        overflow = self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        is_usable = not overflow and math.isfinite(grad_norm)
        if is_usable:
            self._optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
            logger.warning("update %d skipped: gradient norm %s", self.num_updates, grad_norm)
            if self._skipped_in_a_row > self._config.optimizer.max_skipped_updates:
                raise NumericsError(
                    f"update {self.num_updates}: gradient norm {grad_norm}; {self._skipped_in_a_row} updates in a row "
                    f"were not finite, optimizer.max_skipped_updates={self._config.optimizer.max_skipped_updates}; "
                    f"lower the learning rate, or look at the last step's rollouts/"
                )
        return {
            "optimizer/grad_norm": Max(grad_norm),
            "optimizer/learning_rate": Max(float(self._optimizer.param_groups[0]["lr"])),
            "optimizer/skipped_count": Max(float(not is_usable)),
        }

    def _prepare(self, batch: TrainBatch, rows: Sequence[int]) -> UpdateTensors | None:
        """What the loss needs of the whole mini-batch; None on a rank without logits."""
        if batch.credit is None or batch.scored.scores is None:
            return None
        index = torch.tensor(list(rows), dtype=torch.int64)
        credit, scores, rollouts = batch.credit, batch.scored.scores, batch.scored.shard.rollouts
        mask = credit.loss_mask[index]
        return prepare_update(
            self._config.algorithm,
            credit=Credit(
                shaped_rewards=credit.shaped_rewards[index],
                # a row that takes no part in the loss has no advantage either
                advantages=torch.where(mask, credit.advantages[index], 0.0),
                metrics={},
            ),
            token_entropy=scores.token_entropy[index],
            response_mask=mask,
            group_ids=rollouts.group_ids[index],
            old_logprobs=scores.old_logprobs[index],
            # without a scoring pass the old log-probs here are the sampler's too; the forward pass compares
            rollout_logprobs=rollouts.rollout_logprobs[index],
            dp_group=self._groups.dp,
        ).to(self._head.model.output_weight().device)

    def _sampler_metrics(
        self, rollouts: RolloutBatch, micro: PackedMicroBatch, token_logprobs: Tensor, logprobs: Tensor, mask: Tensor
    ) -> Metrics:
        """How far the sampler's log-probs are from the trainer's before its update, which a scoring pass would say.

        Args:
            rollouts: of this rank.
            micro: the micro-batch.
            token_logprobs: ``[R]``, the trainer's, of its response tokens.
            logprobs: ``[rows, width]``, the same.
            mask: ``[rows, width]``, tokens in the loss.
        """
        rows = torch.tensor(micro.rows, dtype=torch.int64)
        sampled = rollouts.rollout_logprobs[rows, : logprobs.shape[1]].to(logprobs.device)
        statistics = off_policy_statistics(self._config.algorithm.off_policy, logprobs, sampled, mask)
        return gap_metrics(token_logprobs.cpu(), _sampler_logprobs(rollouts, micro)) | _as_means(statistics)


def _sampler_logprobs(rollouts: RolloutBatch, micro: PackedMicroBatch) -> Tensor:
    """``[R]``, of the response tokens of a micro-batch."""
    rows = torch.tensor(micro.rows, dtype=torch.int64)[micro.token_rows]
    return rollouts.rollout_logprobs[rows, micro.token_columns]


def _as_means(statistics: dict[str, SumCount]) -> Metrics:
    return {name: Mean(float(value.total), float(value.count)) for name, value in statistics.items()}
