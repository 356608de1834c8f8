"""How the trainer is spread over ranks: one object validates the topology, and its errors print every factor."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import divisors, require_positive
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The trainer's ranks: ``num_ranks = tensor x pipeline x data``.

    Attributes:
        num_ranks: processes in the trainer's world, one a GPU.
        tensor_parallel_size: ranks that share every layer's matrices.
        pipeline_parallel_size: ranks that share the layers.
        sequence_parallel: shard activations between the tensor-parallel regions too; needs tensor_parallel_size > 1.
        distributed_optimizer: shard optimizer state over data-parallel ranks.
    """

    num_ranks: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        require_positive(
            num_ranks=self.num_ranks,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
        )
        if self.num_ranks % (self.tensor_parallel_size * self.pipeline_parallel_size):
            raise ConfigError(
                f"{self}: tensor x pipeline = {self.tensor_parallel_size * self.pipeline_parallel_size} must divide "
                f"num_ranks={self.num_ranks}; choose a product from {divisors(self.num_ranks)}"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(f"{self}: sequence_parallel needs tensor_parallel_size > 1; switch it off")

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.num_ranks // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def sequence_multiple(self) -> int:
        """Packed sequences are padded to a multiple of this, so that sequence parallelism can split them."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

    def __str__(self) -> str:
        """Every factor, for error messages and the start-up log."""
        return (
            f"num_ranks={self.num_ranks} (tensor_parallel_size={self.tensor_parallel_size}, "
            f"pipeline_parallel_size={self.pipeline_parallel_size}, sequence_parallel={self.sequence_parallel})"
        )
