"""One Megatron rank: scores responses, assigns credit, updates, and hands its weights out.

Every method is called on all ranks at once (SPMD): each may contain collectives. Responses come on the CPU and stay on
the rank from scoring to ``release_batch``; stages return metrics only.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.weights.push.ends import open_sender

cpu_platform.install()  # before anything below imports megatron.core

from gtpo_megatron.actor import megatron_init
from gtpo_megatron.actor.checkpoint.rank_checkpoint import RankCheckpoint
from gtpo_megatron.actor.credit import credit_batch
from gtpo_megatron.actor.experts.balance import ExpertBalance
from gtpo_megatron.actor.experts.routing_replay import RoutingReplay
from gtpo_megatron.actor.forward_backward import MicroBatching
from gtpo_megatron.actor.host_memory import HostCopies, optimizer_tensors
from gtpo_megatron.actor.optimizer_step import OptimizerStep
from gtpo_megatron.actor.policy_head import PolicyHead
from gtpo_megatron.actor.policy_update import PolicyUpdate
from gtpo_megatron.actor.scoring import Scoring
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.actor.supervised_update import SupervisedUpdate
from gtpo_megatron.actor.teacher import load_teacher
from gtpo_megatron.actor.trained_model import trained_model
from gtpo_megatron.batch import RewardBatch, RolloutBatch, RolloutShard, ScoredBatch, TrainBatch
from gtpo_megatron.config.algorithm import EntropyCreditSettings
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.shaped_tokens import ShapedTokens, shaped_tokens_of
from gtpo_megatron.distributed.advantage_reducer import reduction_over
from gtpo_megatron.errors import StageOrderError
from gtpo_megatron.kernels.cpu_products import choose_products
from gtpo_megatron.mismatch.gap_report import GapReport, gap_report, merge_gaps
from gtpo_megatron.observability.memory import keep_free_memory, return_free_memory, return_scarce_memory
from gtpo_megatron.observability.metrics import Metric
from gtpo_megatron.observability.profiling import StepProfiler
from gtpo_megatron.weights.checksum import Checksums
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.sender import WeightSender
from gtpo_megatron.weights.push.transports.process_group import open_store

logger = logging.getLogger(__name__)

Metrics = dict[str, Metric]

COLLECTIVE_TIMEOUT_FRACTION = 0.7
"""Share of the stage deadline after which a collective gives up."""

SCORING = ("score_tokens", "use_sampler_scores")
"""Stages of which one scores the batch."""


class MegatronActor:
    """A rank of the trainer.

    Args:
        config: configuration of the run.
        global_rank: number of this process in the trainer's world.
        init_method: meeting point of the ranks, as torch.distributed understands it.
        run_folder: folder of traces; None: none are made.
        address: address of this machine, as the others reach it.

    Attributes:
        coordinates: place of this rank in the layout.
        checkpoint: this rank's part of a checkpoint, to be saved and loaded.
        balance: tokens of each expert.
        batch: this rank's part of the step's batch: a ``ScoredBatch`` after scoring and a ``TrainBatch`` after credit;
            on a rank without logits the ``RolloutShard`` of the beginning. None between steps, and after scoring that
            has raised.

    Collectives: rendezvous and group creation.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        global_rank: int,
        init_method: str,
        run_folder: Path | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        if cpu_platform.is_cpu():
            torch.set_num_threads(config.cluster.threads_per_rank)
            keep_free_memory()
        self._config = config
        self._arch = read_architecture(Path(config.model.path)).for_sequences(config.model.max_sequence_tokens)
        if cpu_platform.is_cpu():
            # a delta rule's recurrence, and what is recomputed, would be rounded too
            is_plain = config.model.dtype == "float32" and config.model.recompute == "none" and self._arch.delta is None
            choose_products(self._arch.hidden_size, may_round_gradients=is_plain and self._arch.experts is None)
        self._arch.check_layout(config.parallel)
        self.coordinates = megatron_init.initialize(
            config.parallel,
            global_rank=global_rank,
            init_method=init_method,
            seed=config.seed,
            # before the driver's own deadline, so that a rank can say that its peers do not answer
            collective_timeout_s=COLLECTIVE_TIMEOUT_FRACTION * config.cluster.stage_deadline_s,
        )
        self._groups = megatron_init.parallel_groups(config.parallel)
        profiler = StepProfiler(config.profile, rank=global_rank, run_folder=run_folder)
        self._report = StageReport(self._arch, config, profiler)
        self._trained = trained_model(config, self._arch, global_rank=global_rank)
        self._chunks, self._model = self._trained.chunks, self._trained.wrapped
        self._policy = self._chunks[-1]  # which has the output layer, on the last pipeline rank
        self._optimizer = self._trained.optimizer
        self._reference = self._trained.reference if config.has_reference else None
        self._head = PolicyHead(
            self._policy,
            self._groups,
            sequence_parallel=config.parallel.sequence_parallel,
            temperature=config.rollout.sampling.temperature,
            vocab_size=self._arch.vocab_size,
            chunk_tokens=config.model.head_chunk_tokens,
            frozen=self._trained.frozen,
        )
        teacher = load_teacher(config, self._model, self._head, self._trained.adapters, global_rank=global_rank)
        self._micro_batching = MicroBatching.of(
            config.parallel,
            self._groups,
            context_index=self.coordinates.context_index,
            budget_tokens=config.update.micro_batch_tokens,
            models=[self._arch] if teacher is None else [self._arch, teacher.arch],
            share_weights=config.adapter.shard_frozen,
        )
        self._optimizer_step = OptimizerStep(self._optimizer, self._trained.schedule)
        self.balance = ExpertBalance(config.balance, self._arch.experts, self._chunks, self._groups)
        self._replay = self._routing_replay()
        self._update = PolicyUpdate(
            config,
            self._model,
            self._optimizer_step,
            self._head,
            self._micro_batching,
            self.balance,
            self._replay,
            self._report,
        )
        self._supervised = SupervisedUpdate(
            self._model, self._optimizer_step, self._head, self._micro_batching, self.balance, self._report
        )
        self._scoring = Scoring(
            self._model,
            self._head,
            self._micro_batching,
            self.balance,
            self._replay,
            self._reference,
            teacher,
            self._report,
            has_logits=self.coordinates.has_logits,
        )
        self._shaped_tokens: ShapedTokens | None = None
        if isinstance(config.algorithm, EntropyCreditSettings) and config.algorithm.unshaped_patterns:
            self._shaped_tokens = shaped_tokens_of(config.model.path, config.algorithm.unshaped_patterns)
        self.checkpoint = RankCheckpoint(
            chunks=self._chunks,
            adapters=self._trained.adapters,
            optimizer_step=self._optimizer_step,
            reference=self._trained.reference,
            teacher_files=None if teacher is None else teacher.files,
        )
        self._address = address
        self._weight_store: Any = None  # stays open while pushes go on
        self._sender: WeightSender | None = None
        self._policy_version = 0
        self.batch: RolloutShard | None = None
        self._last_stage = self._scored_by = "nothing"
        self._host_copies = HostCopies()
        if cpu_platform.is_cpu():
            return_free_memory()  # an engine that starts asks how much is free

    def _routing_replay(self) -> RoutingReplay | None:
        """None if nothing is replayed or compared: routers are then left as they are."""
        source, compares = self._config.update.routing_replay, self._config.rollout.returns_routing
        if self._arch.experts is None or not (source != "none" or compares):
            return None
        return RoutingReplay(
            source,
            compares=compares,
            experts=self._arch.experts,
            chunks=self._chunks,
            parallel=self._config.parallel,
            coordinates=self.coordinates,
            groups=self._groups,
        )

    def _weights(self) -> Mapping[str, Tensor]:
        """This rank's weights, by the names of the weight plans."""
        return self._trained.weights()

    # ------------------------------------------------------------------------------------------------------- (4) score
    def score_tokens(self, shard: RolloutShard) -> Metrics:
        """Old log-probs and entropies of this replica's responses, by the current weights.

        With a reference policy also its log-probs, in a second pass, and with a teacher its, in another.

        Collectives: those of ``Scoring.score``.
        """
        self.batch = None  # before the new one is made, so that its memory is free
        scored, metrics = self._scoring.score(shard, version=self._policy_version)
        self._stage_ends("score_tokens", scored)
        return metrics

    def use_sampler_scores(self, shard: RolloutShard) -> Metrics:
        """The sampler's own log-probs and entropies as the old policy's: no pass over a model but others'.

        Those are of the reference policy and of the teacher. The update then takes ratios to its own log-probs, which
        on policy are the old policy's, and measures how far the sampler's are from them.

        Collectives: those of ``Scoring.use_sampler_scores``.
        """
        self.batch = None
        scored, metrics = self._scoring.use_sampler_scores(shard, version=self._policy_version)
        self._stage_ends("use_sampler_scores", scored)
        return metrics

    def _stage_ends(self, stage: str, batch: RolloutShard | None) -> None:
        self.batch, self._last_stage = batch, stage
        if stage in SCORING:
            self._scored_by = stage
            self._update.trainer_logprobs = None  # of the batch before

    def batch_after(self, *stages: str, asks: str) -> RolloutShard:
        """The batch, for the stage ``asks``; raises StageOrderError unless one of ``stages`` was the last."""
        if self.batch is None or self._last_stage not in stages:
            raise StageOrderError(
                f"{asks} needs the batch that {' or '.join(stages)} leaves, but {self._last_stage} came before it"
            )
        return self.batch

    # -------------------------------------------------------------------------------------------------- (5)(6) credit
    def credit_tokens(self, rewards: RewardBatch) -> Metrics:
        """Shaped rewards and advantages of this rank's responses; see ``credit_batch``.

        Args:
            rewards: rewards of all responses of the step.

        Raises:
            StageOrderError: nothing was scored since the last batch.

        Collectives: those of ``advantage_reducer`` over dp, on ranks with logits.
        """
        metrics: Metrics = {}
        batch = self.batch_after(*SCORING, asks="credit_tokens")
        if isinstance(batch, ScoredBatch):
            batch, metrics = credit_batch(
                self._config,
                batch,
                rewards,
                shaped_tokens=self._shaped_tokens,
                reduction=reduction_over(self._groups.dp),
            )
        self._stage_ends("credit_tokens", batch)
        return metrics

    # -------------------------------------------------------------------------------------------------- (7)(8) update
    def update(self, step: int) -> Metrics:
        """The optimizer updates of one step; see ``PolicyUpdate``.

        Raises:
            StageOrderError: the batch has no credit, or updates were made from it already.
        """
        batch = self.batch_after("credit_tokens", asks="update")
        self._stage_ends("update", batch)  # first: half an update must not be made again
        metrics = self._update.run(batch, step=step)
        self._policy_version = step
        if self._reference is not None:
            self._reference.step_ends(step)
        return metrics | self._report.take()

    # ---------------------------------------------------------------------------------------------- given conversations
    def fit(self, batch: RolloutBatch, *, num_tokens: int, step: int) -> Metrics:
        """The optimizer update of a step of supervised fine-tuning; see ``SupervisedUpdate``."""
        metrics = self._supervised.run(batch, num_tokens=num_tokens, step=step)
        self._policy_version = step
        self._report.profiler.step_done(step)
        if cpu_platform.is_cpu():
            return_scarce_memory()
        return metrics

    def heldout_loss(self, batch: RolloutBatch) -> Metrics:
        """The loss of conversations that are not trained; see ``SupervisedUpdate``."""
        return self._supervised.measure(batch)

    # -------------------------------------------------------------------------------------------------------- (9) push
    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """Opens a store on this machine at which both sides of a push meet; returns host and port."""
        self._weight_store = open_store(self._address, deadline_s=deadline_s)
        return self._address, self._weight_store.port

    def connect_weights(self, link: WeightLink) -> None:
        """Opens this rank's end of the pushes; one that was open before is closed."""
        if self._sender is not None:
            self._sender.close()
        self._sender = open_sender(link, self.coordinates.global_rank)

    def send_weights(self, version: int, with_checksums: bool) -> Checksums:
        """Sends this rank's part of the weights as policy ``version``; all ranks and the sampler at once.

        Returns:
            This rank's parts of the checksums of every sampler worker, or nothing.

        Communication: that of the link's transport, to the sampler's workers; of frozen weights that replicas share
            those of ``FrozenShards.in_turns``.
        """
        self._policy_version = version
        assert self._sender is not None, "connect_weights comes first"
        with self._report.profiler.stage("send_weights", step=version):
            trained, alone = self._trained, self._config.adapter.pushes_alone
            pushed = trained.adapters.tensors() if trained.adapters is not None and alone else self._weights()
            in_turns = sorted if alone or trained.frozen is None else trained.frozen.in_turns
            checksums = self._sender.push(pushed, with_checksums=with_checksums, in_turns=in_turns)
        self._report.profiler.step_done(version)
        return checksums

    # ------------------------------------------------------------------------------------------ looking, saving, ending
    def rows_of_groups(self, group_ids: Sequence[int]) -> TrainBatch | None:
        """The responses of the chosen groups that this replica holds.

        Raises:
            StageOrderError: the batch has no credit, or was released.

        Returns:
            None on a rank that does not report: its peers hold the same responses. Communication: none.
        """
        batch = self.batch_after("credit_tokens", "update", asks="rows_of_groups")
        if not self.coordinates.reports or not isinstance(batch, TrainBatch):
            return None
        chosen, groups = set(group_ids), batch.rollouts.group_ids.tolist()
        return batch.select([row for row, group in enumerate(groups) if group in chosen])

    def explain_gap(self, typical_nats: float) -> GapReport:
        """Reports where this rank's responses have log-prob gaps, by the trainer's log-probs that were compared last.

        Args:
            typical_nats: gap up to which a token is as it should be.

        Raises:
            StageOrderError: no batch is scored.

        Returns:
            The report; empty on a rank without logits. Communication: none.
        """
        batch = self.batch_after(*SCORING, "credit_tokens", "update", asks="explain_gap")
        logprobs = self._update.trainer_logprobs  # of an update without a scoring pass
        if isinstance(batch, ScoredBatch) and self._scored_by == "score_tokens":
            logprobs = batch.old_logprobs
        if logprobs is None:
            return merge_gaps([])
        return gap_report(batch.rollouts, logprobs, rows=batch.global_rows, typical_nats=typical_nats)

    def release_batch(self) -> None:
        """Frees the step's responses, and the memory of all that the stages computed. Communication: none."""
        self._stage_ends("release_batch", None)
        if self._replay is not None:
            self._replay.release()
        if cpu_platform.is_cpu():
            return_scarce_memory()

    def offload(self) -> None:
        """Moves gradients and optimizer state to the host; without a GPU nothing happens. Communication: none."""
        if cpu_platform.is_cpu():
            logger.info("gradients and optimizer stay where they are: there is no GPU to share")
            return
        for chunk in self._model:
            chunk.offload_grad_buffers()  # zeroed before the next update, so nothing is kept of them
        kept = optimizer_tensors(self._optimizer, (p for chunk in self._chunks for p in chunk.parameters()))
        here = cpu_platform.device()  # some may be on the host for good
        parked = self._host_copies.park(tensor for tensor in kept if tensor.device == here)
        torch.cuda.empty_cache()
        logger.info("%.1f GiB of optimizer state are on the host", parked / 2**30)

    def onload(self) -> None:
        """Moves gradients and optimizer state back to the GPU. Communication: none."""
        if cpu_platform.is_cpu():
            return
        self._host_copies.fetch()
        for chunk in self._model:
            chunk.restore_grad_buffers()

    def close(self) -> None:
        """Ends a trace and a save that are still on their way, and leaves the trainer's world."""
        self._report.profiler.close()
        self.checkpoint.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        megatron_init.shut_down()
