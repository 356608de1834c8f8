"""How the trainer is spread over ranks: one object validates the topology, and its errors print every factor."""

import math
from dataclasses import dataclass

from pydantic import PositiveInt

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Consecutive layers, dealt to the virtual stages of a pipeline; all alike but those of the last pipeline rank.

    A *virtual stage* is one chunk of layers of one pipeline rank: stage ``chunk * pipeline + rank``. The last rank also
    has the output layer, and can be given fewer layers for it. Megatron-core's ``num_layers_in_last_pipeline_stage``
    means the same.

    Attributes:
        pipeline: ranks that share the layers.
        virtual: chunks of each rank.
        last_rank_layers: layers of the last rank, in all its chunks together; None: as many as the others have.
    """

    pipeline: int = 1
    virtual: int = 1
    last_rank_layers: int | None = None

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pipeline * self.virtual

    def problem(self, num_layers: int) -> str | None:
        """What is wrong with so many layers, and what would be right; None if they can be dealt."""
        last = self.last_rank_layers
        if last is None:
            if num_layers % self.num_stages == 0:
                return None
            return (
                f"pipeline_parallel_size x virtual_pipeline_size = {self.num_stages} must divide num_layers="
                f"{num_layers} of this model; choose a product from {divisors(num_layers)}, or give the last stage "
                f"fewer layers (last_stage_layers)"
            )
        others = self.pipeline - 1
        if last % self.virtual == 0 and (num_layers - last) % (others * self.virtual) == 0 and last < num_layers:
            return None
        allowed = [
            size
            for size in range(self.virtual, num_layers, self.virtual)
            if (num_layers - size) % (others * self.virtual) == 0
        ]
        return (
            f"last_stage_layers={last} of this model's {num_layers} leaves {num_layers - last} for {others} other "
            f"stages of {self.virtual} chunks; choose from {allowed}"
        )

    def layers(self, num_layers: int, stage: int) -> range:
        """Numbers of the layers of a virtual stage; ``problem`` must have found nothing."""
        chunk, rank = divmod(stage, self.pipeline)
        if self.last_rank_layers is None:
            size = num_layers // self.num_stages
            return range(stage * size, (stage + 1) * size)
        last = self.last_rank_layers // self.virtual
        size = (num_layers - self.last_rank_layers) // ((self.pipeline - 1) * self.virtual)
        first = chunk * ((self.pipeline - 1) * size + last) + rank * size
        return range(first, first + (last if rank == self.pipeline - 1 else size))


def engine_layers(num_layers: int, stages: int, stage: int) -> range:
    """Numbers of the layers of a stage of vLLM's pipeline, by its rule.

    Of a remainder the stages before the last have a layer more each: two stages of 7 layers have 4 and 3, four stages
    of 30 have 7, 8, 8 and 7.
    """
    each, more = divmod(num_layers, stages)
    starts = [stage * each + max(0, min(stage - (stages - 1 - more), more)) for stage in range(stages + 1)]
    return range(starts[stage], starts[stage + 1])


@configuration
class ParallelConfig:
    """The trainer's ranks: ``num_ranks = tensor x pipeline x context x data``. docs/parallelism.md helps to choose.

    Attributes:
        num_ranks: processes in the trainer's world, one per GPU.
        tensor_parallel_size: ranks that share every layer's matrices.
        pipeline_parallel_size: ranks that share the layers.
        virtual_pipeline_size: model chunks per pipeline rank, each with layers of its own; more of them make the
            pipeline's bubble smaller and its messages more. Needs pipeline_parallel_size > 1.
        last_stage_layers: layers of the last pipeline rank, which also has the output layer and is waited for by all
            others if it has as many layers as they; None: equally many. The others share the rest evenly. Needs
            pipeline_parallel_size > 1; ``gtpo-megatron plan`` chooses it.
        context_parallel_size: ranks that share the tokens of every sequence.
        sequence_parallel: shard activations between the tensor-parallel regions too; needs tensor_parallel_size > 1.
        distributed_optimizer: shard optimizer state over the ranks that hold the same weights (data x context).
        expert_parallel_size: ranks that share the experts of a layer, out of tensor x context x data; 1 for a dense
            model.
        expert_tensor_parallel_size: ranks that share the matrices of each expert. The ranks of a pipeline stage are
            ``expert tensor x expert x expert data``, a partition of its own beside ``tensor x context x data``.
    """

    num_ranks: PositiveInt
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    virtual_pipeline_size: PositiveInt = 1
    last_stage_layers: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    expert_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1

    def __post_init__(self) -> None:
        if self.num_ranks % self.replica_size:
            raise ConfigError(
                f"{self}: tensor x pipeline x context = {self.replica_size} must divide num_ranks={self.num_ranks}; "
                f"choose a product from {divisors(self.num_ranks)}"
            )
        stage_ranks = self.num_ranks // self.pipeline_parallel_size
        if stage_ranks % (self.expert_tensor_parallel_size * self.expert_parallel_size):
            raise ConfigError(
                f"{self}: expert tensor x expert = {self.expert_tensor_parallel_size * self.expert_parallel_size} must "
                f"divide the {stage_ranks} ranks of a pipeline stage; choose a product from {divisors(stage_ranks)}"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(f"{self}: sequence_parallel needs tensor_parallel_size > 1; switch it off")
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ConfigError(f"{self}: virtual_pipeline_size needs pipeline_parallel_size > 1; set it to 1")
        if self.last_stage_layers is not None and self.pipeline_parallel_size == 1:
            raise ConfigError(f"{self}: last_stage_layers needs pipeline_parallel_size > 1; leave it out")

    @property
    def layer_split(self) -> LayerSplit:
        """Which layers each stage holds."""
        return LayerSplit(self.pipeline_parallel_size, self.virtual_pipeline_size, self.last_stage_layers)

    @property
    def replica_size(self) -> int:
        """Ranks that work on one set of responses together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Replicas, each with responses of its own."""
        return self.num_ranks // self.replica_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Replicas of each expert."""
        return self.num_ranks // (
            self.pipeline_parallel_size * self.expert_tensor_parallel_size * self.expert_parallel_size
        )

    @property
    def replicas_share_experts(self) -> bool:
        """Tokens of a replica pass experts on ranks of another one, so that both must make their passes together.

        The ranks of ``expert tensor x expert`` are neighbours in a pipeline stage, and so are those of a replica
        (``tensor x context``): either whole groups of the former lie in each replica, or some group has ranks of two.
        """
        in_replica = self.tensor_parallel_size * self.context_parallel_size
        return in_replica % (self.expert_tensor_parallel_size * self.expert_parallel_size) != 0

    @property
    def document_multiple(self) -> int:
        """Every sequence is padded to a multiple of this: two chunks per context-parallel rank."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this, so that sequence parallelism can split it."""
        shards = self.tensor_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.document_multiple, shards * self.context_parallel_size)

    def __str__(self) -> str:
        """Every factor, for error messages and the start-up log."""
        return (
            f"num_ranks={self.num_ranks} (tensor_parallel_size={self.tensor_parallel_size}, "
            f"pipeline_parallel_size={self.pipeline_parallel_size}, "
            f"virtual_pipeline_size={self.virtual_pipeline_size}, {self._last_stage}"
            f"context_parallel_size={self.context_parallel_size}, data_parallel_size="
            f"{self.num_ranks / self.replica_size:g}, sequence_parallel={self.sequence_parallel}, "
            f"distributed_optimizer={self.distributed_optimizer}{self._experts})"
        )

    @property
    def _last_stage(self) -> str:
        return "" if self.last_stage_layers is None else f"last_stage_layers={self.last_stage_layers}, "

    @property
    def _experts(self) -> str:
        """Only if a factor is not 1, so that nothing about experts stands in a dense run's messages."""
        if self.expert_parallel_size == self.expert_tensor_parallel_size == 1:
            return ""
        return (
            f", expert_parallel_size={self.expert_parallel_size}, "
            f"expert_tensor_parallel_size={self.expert_tensor_parallel_size}"
        )
