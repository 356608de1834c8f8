"""(4) Old log-probs and entropies of a batch, from a forward pass of this rank's model or from the sampler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor.experts.balance import ExpertBalance
from gtpo_megatron.actor.experts.routing_replay import RoutingReplay
from gtpo_megatron.actor.forward_backward import MicroBatching, run_micro_batches
from gtpo_megatron.actor.policy_head import PolicyHead
from gtpo_megatron.actor.reference import FrozenReference, ReferencePolicy
from gtpo_megatron.actor.score_metrics import entropy_metrics, score_metrics
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.actor.teacher import Teacher
from gtpo_megatron.batch import RolloutBatch, RolloutShard, ScoredBatch, fields_of
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.distributed.vocab_parallel import TokenScores
from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.metrics import Metric

Metrics = dict[str, Metric]


class Scoring:
    """Scores one batch a step.

    Args:
        chunks: parts of the model on this rank, as Megatron has wrapped them.
        head: output layer.
        micro_batching: cut of a batch into micro-batches.
        balance: load of the experts.
        replay: routing of the experts; None if nothing is replayed or compared.
        reference: weights of the reference policy; None without one.
        teacher: model that the student learns from; None without one.
        stages: costs of the stages.
        has_logits: whether this rank has scores; others take part in the forward passes only.
    """

    def __init__(  # noqa: PLR0913 - parts of a rank
        self,
        chunks: Sequence[Any],
        head: PolicyHead,
        micro_batching: MicroBatching,
        balance: ExpertBalance,
        replay: RoutingReplay | None,
        reference: ReferencePolicy | FrozenReference | None,
        teacher: Teacher | None,
        stages: StageReport,
        *,
        has_logits: bool,
    ) -> None:
        self._chunks = chunks
        self._head = head
        self._micro_batching = micro_batching
        self._balance = balance
        self._replay = replay
        self._reference = reference
        self._teacher = teacher
        self._stages = stages
        self._has_logits = has_logits

    def score(self, shard: RolloutShard, *, version: int) -> tuple[RolloutShard, Metrics]:
        """Scores this replica's responses by the current weights, which are policy ``version``.

        Collectives: Megatron's over tp, cp and pp; of a mixture of experts also over ep, and one sum over the world.
        """
        mine = shard.rollouts
        batches = self._micro_batching.cut(mine, range(mine.num_responses))
        self._stages.step_begins(version + 1)
        self._balance.begin(with_grad=False)
        if self._replay is not None:
            self._replay.begin_scoring(batches, mine)
        with self._stages.stage("score"):
            logprobs, entropy = _forward(self._chunks, self._head, batches, mine)
        loads = self._balance.end()
        if self._replay is not None:
            loads |= self._replay.end_scoring(batches, mine)
        self._stages.add_work("score", mine, range(mine.num_responses), batches, with_backward=False)
        scored = self._scored(shard, logprobs, entropy, batches, version)
        metrics = score_metrics(scored) if isinstance(scored, ScoredBatch) else {}
        return scored, metrics | loads | self._stages.take()

    def use_sampler_scores(self, shard: RolloutShard, *, version: int) -> tuple[RolloutShard, Metrics]:
        """Takes the sampler's own scores: no pass over a model but the reference's and the teacher's.

        Raises:
            DataError: the sampler sent no entropies, or had other weights than this trainer.

        Collectives: Megatron's over tp, cp, pp and ep, if there is a reference policy or a teacher.
        """
        mine = shard.rollouts
        if mine.token_entropy is None:
            raise DataError(
                "the responses carry no entropies; the engine must run with rollout.entropy_source='rollout'"
            )
        if shard.policy_version != version:
            raise DataError(
                f"responses of policy version {shard.policy_version}, the trainer has {version}; the sampler's scores "
                f"stand for the trainer's only where both have the same weights"
            )
        self._stages.step_begins(version + 1)
        if self._replay is not None:
            self._replay.skip_scoring(mine)
        batches: list[PackedMicroBatch] = []
        if self._reference is not None or self._teacher is not None:
            batches = self._micro_batching.cut(mine, range(mine.num_responses))
        scored = self._scored(shard, mine.rollout_logprobs, mine.token_entropy, batches, version)
        return scored, entropy_metrics(scored) if isinstance(scored, ScoredBatch) else {}

    def _reference_logprobs(self, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch) -> Tensor | None:
        """``[B, T]``. Routers of a mixture choose freely: no other policy's choices are replayed, and none are kept."""
        if self._reference is None:
            return None
        with self._stages.stage("reference"), self._reference.in_place():
            return _forward(self._chunks, self._head, batches, rollouts)[0]

    def _teacher_logprobs(self, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch) -> Tensor | None:
        """``[B, T]``, of the student's tokens."""
        if self._teacher is None:
            return None
        teacher = self._teacher
        with self._stages.stage("teacher"), teacher.at_hand():
            found, _ = _forward(teacher.chunks, teacher.head, teacher.readable(batches), rollouts)
        return teacher.with_absent(found, rollouts)

    def _scored(
        self,
        shard: RolloutShard,
        logprobs: Tensor,
        entropy: Tensor,
        batches: Sequence[PackedMicroBatch],
        version: int,
    ) -> RolloutShard:
        """This rank's responses, with their scores and those by the other models if it has logits."""
        reference = self._reference_logprobs(batches, shard.rollouts)
        teacher = self._teacher_logprobs(batches, shard.rollouts)
        if not self._has_logits:
            return shard
        return ScoredBatch(
            **fields_of(shard),
            old_logprobs=logprobs,
            token_entropy=entropy,
            ref_logprobs=reference,
            teacher_logprobs=teacher,
            scored_version=version,
        )


def _forward(
    chunks: Sequence[Any], head: PolicyHead, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies ``[B, T]`` of the weights that the model has; zeros on ranks without logits.

    Collectives: Megatron's over tp, cp, pp and ep.
    """
    logprobs, entropy = torch.zeros(rollouts.response_ids.shape), torch.zeros(rollouts.response_ids.shape)

    def keep(hidden: Tensor, batch: PackedMicroBatch) -> tuple[Tensor, tuple[PackedMicroBatch, TokenScores]]:
        return torch.zeros([], device=hidden.device), (batch, head.score(hidden, batch))

    # copied to the host at the end: a copy in between would wait for the device once a micro-batch
    for batch, scores in run_micro_batches(chunks, batches, keep, forward_only=True):
        places = (torch.tensor(batch.rows, dtype=torch.int64)[batch.token_rows], batch.token_columns)
        logprobs[places] = scores.logprobs.float().cpu()
        entropy[places] = scores.entropy.float().cpu()
    return logprobs, entropy
