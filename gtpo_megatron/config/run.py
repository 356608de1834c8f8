"""The root of a run's configuration and the checks that span its parts."""

from dataclasses import replace
from pathlib import Path

from pydantic import PositiveInt

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import AlgorithmConfig, GTPOConfig, TeacherConfig
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, ReferenceConfig, SoftOverlongPenalty
from gtpo_megatron.config.checks import require_seed, require_text
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.configuration import check_fields, configuration
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.model import BalanceConfig, ModelConfig
from gtpo_megatron.config.optimizer import OptimizerConfig, UpdateConfig
from gtpo_megatron.config.output import CheckpointConfig, LoggingConfig, ProfileConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import DataConfig, DatasetRef, EvaluationConfig, metric_names
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.rollout import RolloutConfig, Transport, WeightSyncConfig
from gtpo_megatron.errors import ConfigError


@configuration
class RunConfig:
    """Everything that determines a run.

    Two runs with equal configurations on equal machines are equal bit for bit, unless ``rollout`` has engines sample
    continuously: ``max_staleness`` above 1, ``partial`` or ``over_sample``.

    Attributes:
        name: name of the recipe, for people.
        seed: seed of prompts, samples and mini-batches.
        num_steps: training steps; a step is one rollout batch.
    """

    name: str
    num_steps: PositiveInt
    model: ModelConfig
    data: DataConfig
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    seed: int = 0
    adapter: AdapterConfig = AdapterConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    update: UpdateConfig = UpdateConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    balance: BalanceConfig = BalanceConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        check_fields(self.algorithm)
        require_text(name=self.name)
        require_seed(seed=self.seed)
        self._check_lengths()
        self._check_length_penalty()
        self._check_batch()
        self._check_sampling()
        self._check_entropy_source()
        self._check_environment()
        if self.update.routing_replay == "rollout" and not self.rollout.returns_routing:
            raise ConfigError(
                "update.routing_replay='rollout' with rollout.returns_routing=False: the sampler must return what its "
                "routers chose; set --rollout.returns-routing"
            )
        if (
            self.model.recompute == "experts"
            and self.update.routing_replay != "none"
            and self.parallel.pipeline_parallel_size > 1
        ):
            raise ConfigError(
                f"model.recompute='experts' with update.routing_replay={self.update.routing_replay!r} and "
                f"parallel.pipeline_parallel_size={self.parallel.pipeline_parallel_size}: experts that are made again "
                f"by themselves do not know of which micro-batch they are; use recompute='full' or 'none'"
            )
        self.algorithm.check_run(update=self.update, rollout=self.rollout)
        self._check_reference()
        self._check_teacher()
        self._check_profile()
        shared = self.rollout.num_engines * self.rollout.ranks_per_engine
        if self.rollout.placement == "colocated" and shared > self.parallel.num_ranks:
            raise ConfigError(
                f"rollout.placement='colocated' with rollout.num_engines={self.rollout.num_engines} and "
                f"rollout.tensor_parallel_size={self.rollout.tensor_parallel_size} (x "
                f"pipeline_parallel_size={self.rollout.pipeline_parallel_size}) needs {shared} ranks to share GPUs "
                f"with, parallel.num_ranks={self.parallel.num_ranks}; use fewer or smaller engines"
            )
        if self.weight_sync.transport == "relay" and self.rollout.placement != "colocated":
            raise ConfigError(
                f"weight_sync.transport='relay' with rollout.placement={self.rollout.placement!r}: ranks hand weights "
                f"on to the workers on their own GPUs; use placement='colocated', or transport='process_group'"
            )
        self._check_adapter()
        if self.optimizer.offload_fraction > 0 and not self.parallel.distributed_optimizer:
            raise ConfigError(
                f"optimizer.offload_fraction={self.optimizer.offload_fraction} needs "
                f"parallel.distributed_optimizer=True; got {self.parallel}"
            )
        self._check_best_checkpoints()
        self._check_local()

    @property
    def num_updates(self) -> int:
        """Optimizer updates in the whole run."""
        return self.num_steps * self.update.updates_per_rollout

    @property
    def heldout_sets(self) -> dict[str, DatasetRef]:
        """Every held-out set by its label; rows that have the training set's columns are read by them."""
        return {
            label: replace(
                ref, usual_prompt_column=self.data.prompt_column, usual_answer_column=self.data.answer_column
            )
            for label, ref in self.evaluation.sets.items()
        }

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference policy."""
        return self.algorithm.reference_kl.coef > 0 or self.reference.measured

    @property
    def has_own_teacher(self) -> bool:
        """Whether the run has a teacher whose weights are not there already, as those below adapters are."""
        is_base = self.adapter.is_on and Path(self.teacher.path).resolve() == Path(self.model.path).resolve()
        return self.teacher.path != "" and not is_base

    def transport(self, *, has_gpus: bool) -> Transport:
        """How the bytes of a push travel; what ``weight_sync.transport="auto"`` stands for."""
        if self.weight_sync.transport != "auto":
            return self.weight_sync.transport
        if has_gpus and self.rollout.placement == "colocated":
            return "relay"
        reaches_others = self.rollout.nodes_per_engine > 1 or (has_gpus and self.cluster.mode == "ray")
        return "process_group" if reaches_others else "shared_memory"

    def _check_reference(self) -> None:
        """What is said of a reference policy that nothing reads is a mistake."""
        for name in ("path", "reset_every_steps"):
            if getattr(self.reference, name) and not self.has_reference:
                raise ConfigError(
                    f"reference.{name}={getattr(self.reference, name)!r} with algorithm.reference_kl.coef=0: nothing "
                    f"compares with a reference policy; set the coef, or --reference.measured"
                )
            if getattr(self.reference, name) and self.adapter.is_on:
                raise ConfigError(
                    f"reference.{name}={getattr(self.reference, name)!r} with adapter.rank={self.adapter.rank}: the "
                    f"frozen weights below the adapters are the reference policy; leave it out"
                )

    def _check_teacher(self) -> None:
        """A teacher is there if the algorithm reads one, and only then."""
        kind = type(self.algorithm).__name__
        if self.algorithm.needs_teacher and not self.teacher.path:
            raise ConfigError(
                f"algorithm {kind} without teacher.path: its credit is a teacher's; set --teacher.path FOLDER"
            )
        if self.teacher.path and not self.algorithm.needs_teacher:
            raise ConfigError(
                f"teacher.path={self.teacher.path!r} with algorithm {kind}: it reads no teacher; use "
                f"--teacher.path '', or --algorithm DistillConfig, whose reward_coef adds GRPO's advantages"
            )

    def _check_local(self) -> None:
        """What one process cannot do."""
        if self.cluster.mode != "local":
            return
        if self.rollout.num_engines != 1:
            raise ConfigError(
                f"cluster.mode='local' has one engine, got rollout.num_engines={self.rollout.num_engines}; "
                f"use mode='ray' or num_engines=1"
            )
        if self.rollout.nodes_per_engine != 1:
            raise ConfigError(
                f"cluster.mode='local' is one process, got rollout.nodes_per_engine={self.rollout.nodes_per_engine}; "
                f"use mode='ray' or nodes_per_engine=1"
            )
        if self.rollout.is_continuous:
            raise ConfigError(
                f"cluster.mode='local' samples the groups of a step together, got rollout.max_staleness="
                f"{self.rollout.max_staleness}, partial={self.rollout.partial}, "
                f"over_sample={self.rollout.over_sample}; use mode='ray', or max_staleness of 0 or 1 alone"
            )
        if self.parallel.num_ranks != 1:
            raise ConfigError(
                f"cluster.mode='local' runs one rank, got {self.parallel}; use mode='ray' or parallel.num_ranks=1"
            )

    def _check_profile(self) -> None:
        profile = self.profile
        if profile.tool == "none":
            return
        if max(profile.ranks) >= self.parallel.num_ranks:
            raise ConfigError(f"profile.ranks={profile.ranks!r}: there are ranks 0 to {self.parallel.num_ranks - 1}")
        if (last := profile.first_step + profile.num_steps - 1) > self.num_steps:
            raise ConfigError(
                f"profile.first_step={profile.first_step} with profile.num_steps={profile.num_steps} ends at step "
                f"{last}, past num_steps={self.num_steps}; trace earlier or fewer steps"
            )

    def _check_lengths(self) -> None:
        for where, sampling in (("rollout", self.rollout.sampling), ("evaluation", self.evaluation.sampling)):
            needed = self.data.max_prompt_tokens + sampling.max_response_tokens
            if needed > self.model.max_sequence_tokens:
                raise ConfigError(
                    f"data.max_prompt_tokens={self.data.max_prompt_tokens} + {where}.sampling.max_response_tokens="
                    f"{sampling.max_response_tokens} = {needed} exceeds model.max_sequence_tokens="
                    f"{self.model.max_sequence_tokens}; raise it or shorten one of them"
                )

    def _check_length_penalty(self) -> None:
        """A ramp that ends at another limit than the sampler's never acts, or acts on every response.

        In a conversation others' tokens count to the limit and not to the length, so that it may well end before.
        """
        limit = self.rollout.sampling.max_response_tokens
        where, penalty = "algorithm.length_penalty", self.algorithm.length_penalty
        if isinstance(penalty, GroupRelativeLengthPenalty):
            where, penalty = f"{where}.hard_group_penalty", penalty.hard_group_penalty
        if not isinstance(penalty, SoftOverlongPenalty) or penalty.max_tokens == limit:
            return
        if not self.environment.name or penalty.max_tokens > limit:
            option = f"--{where.replace('_', '-')}"
            before = ", or before" if self.environment.name else ""
            raise ConfigError(
                f"{where}.max_tokens={penalty.max_tokens} differs from rollout.sampling.max_response_tokens={limit}: "
                f"the penalty's ramp must end where responses are cut{before}; set {option}.max-tokens {limit} "
                f"{option}.buffer-tokens {penalty.ending_at(limit).buffer_tokens}"
            )

    def _check_batch(self) -> None:
        mini, prompts = self.update.mini_batch_prompts, self.data.prompts_per_step
        if mini > prompts:
            raise ConfigError(
                f"update.mini_batch_prompts={mini} exceeds data.prompts_per_step={prompts}; use 0 for all of them"
            )

    def check_new(self) -> None:
        """What only a new run is refused for: recorded ones that have it can be read, and go on.

        Raises:
            ConfigError: no update would use some of the responses, or prompts are to be verbatim beside an environment.
        """
        mini, prompts = self.update.mini_batch_prompts, self.data.prompts_per_step
        updates = self.update.updates_per_rollout
        if 0 < mini * updates < prompts:
            raise ConfigError(
                f"update.mini_batch_prompts={mini} with update.updates_per_rollout={updates} would train "
                f"{mini * updates} of data.prompts_per_step={prompts} prompts and throw the others away; use "
                f"--update.updates-per-rollout {-(-prompts // mini)}, or --update.mini-batch-prompts 0 for one "
                "update of all"
            )
        self.environment.check_template(verbatim_text=self.data.verbatim_text, where="data.verbatim_text")

    def _check_sampling(self) -> None:
        """The actor scores the full distribution; a truncated sampler would make every ratio wrong."""
        sampling = self.rollout.sampling
        if sampling.temperature == 0:
            raise ConfigError(
                "rollout.sampling.temperature=0.0: must be greater than 0; training needs responses that differ"
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(
                f"rollout.sampling.top_p={sampling.top_p}, rollout.sampling.top_k={sampling.top_k}: training scores "
                f"the full distribution, so responses must come from it (top_p=1, top_k=0); evaluation may truncate"
            )

    def _check_entropy_source(self) -> None:
        """Without a scoring pass nobody knows the trainer's log-probs before its update."""
        if self.rollout.entropy_source == "actor":
            return
        if self.update.updates_per_rollout > 1:
            raise ConfigError(
                f"rollout.entropy_source='rollout' with update.updates_per_rollout={self.update.updates_per_rollout}: "
                f"updates after the first need the trainer's log-probs from before it, which is the scoring pass; "
                f"set --rollout.entropy-source actor, or updates_per_rollout=1"
            )
        if self.algorithm.off_policy.is_on:
            raise ConfigError(
                f"rollout.entropy_source='rollout' with algorithm.off_policy.mode={self.algorithm.off_policy.mode!r}: "
                f"the correction needs the trainer's log-probs before its update; set --rollout.entropy-source actor"
                + ("" if self.rollout.dtype == "fp8" else ", or --algorithm.off-policy.mode off")  # FP8 needs one
            )
        if self.update.routing_replay == "score":
            raise ConfigError(
                "rollout.entropy_source='rollout' with update.routing_replay='score': there is no scoring pass to "
                "replay; use routing_replay='rollout', or entropy_source='actor'"
            )
        if self.balance.aux_loss_coef > 0:
            raise ConfigError(
                f"rollout.entropy_source='rollout' with balance.aux_loss_coef={self.balance.aux_loss_coef}: the loss "
                f"takes the experts' loads from the scoring pass; use entropy_source='actor' or aux_loss_coef=0"
            )

    def _check_environment(self) -> None:
        if not self.environment.name:
            if isinstance(self.algorithm, GTPOConfig) and self.algorithm.turn_reward_coef:
                raise ConfigError(
                    f"algorithm.turn_reward_coef={self.algorithm.turn_reward_coef} without environment.name: only an "
                    f"environment rewards turns; name one, or use 0"
                )
            return
        self.environment.check_reward(self.reward.function)
        if self.rollout.returns_routing:
            raise ConfigError(
                f"rollout.returns_routing=True with environment.name={self.environment.name!r}: routing is not kept "
                f"over turns; use update.routing_replay='score' or 'none'"
            )

    def _check_adapter(self) -> None:
        if not self.adapter.is_on:
            return
        on = [name for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate") if getattr(self.balance, name)]
        if on:
            raise ConfigError(
                f"balance.{on[0]}={getattr(self.balance, on[0])} with adapter.rank={self.adapter.rank}: routers are "
                f"frozen; set it to 0"
            )
        of_experts = [target for target in self.adapter.targets if target.startswith("experts.")]
        if of_experts and self.parallel.expert_tensor_parallel_size > 1:
            raise ConfigError(
                f"adapter.targets={self.adapter.targets!r} with parallel.expert_tensor_parallel_size="
                f"{self.parallel.expert_tensor_parallel_size}: adapters of {of_experts[0]} are whole on a rank; share "
                f"whole experts, with --parallel.expert-tensor-parallel-size 1"
            )
        if self.adapter.pushes_alone and self.rollout.pipeline_parallel_size > 1:
            raise ConfigError(
                f"adapter.push='adapters' with rollout.pipeline_parallel_size={self.rollout.pipeline_parallel_size}: "
                f"adapters alone travel whole to every worker, and a stage has some of the layers; use push='merged'"
            )
        if self.adapter.pushes_alone and (self.model.dtype, self.rollout.dtype) == ("bfloat16", "float32"):
            raise ConfigError(
                "rollout.dtype='float32' with model.dtype='bfloat16' and adapter.push='adapters': the sampler reads "
                "the frozen weights unrounded, the trainer rounds them; use rollout.dtype='bfloat16', or "
                "push='merged'"
            )
        if self.adapter.pushes_alone and self.rollout.dtype == "fp8":
            raise ConfigError(
                "rollout.dtype='fp8' with adapter.push='adapters': the frozen weights would be rounded below adapters "
                "that are not, which is not tried; use push='merged'"
            )
        if self.optimizer.offload_fraction > 0:
            raise ConfigError(
                f"optimizer.offload_fraction={self.optimizer.offload_fraction} with adapter.rank={self.adapter.rank}: "
                f"the optimizer has the adapters only, and stays on the GPU; set it to 0"
            )

    def _check_best_checkpoints(self) -> None:
        """Which checkpoint is best can be said only of those whose step was measured."""
        checkpoint, evaluation = self.checkpoint, self.evaluation
        if not checkpoint.keep_best:
            return
        measured = [name for label in evaluation.sets for name in metric_names(label)]
        if checkpoint.best_metric not in measured:
            raise ConfigError(
                f"checkpoint.best_metric={checkpoint.best_metric!r}: measured are {', '.join(measured)}; name one"
            )
        if checkpoint.every_steps and not evaluation.every_steps:
            raise ConfigError(
                f"checkpoint.keep_best={checkpoint.keep_best} needs measurements during the run, and "
                f"evaluation.every_steps=0 makes none; let both fall on the same steps"
            )
