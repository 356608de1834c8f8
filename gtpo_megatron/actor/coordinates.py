"""Position of a rank in the trainer's layout. Free of Megatron, so that a driver can talk about ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoordinates:
    """A rank's index along every axis.

    Attributes:
        global_rank: in the trainer's world.
        tensor_index: along the tensor-parallel axis.
        pipeline_index: along the pipeline axis.
        context_index: along the context-parallel axis.
        data_index: along the data-parallel axis.
        pipeline_size: stages there are.
    """

    global_rank: int
    tensor_index: int
    pipeline_index: int
    context_index: int
    data_index: int
    pipeline_size: int

    def __str__(self) -> str:
        return (
            f"rank {self.global_rank} (tp{self.tensor_index} pp{self.pipeline_index} cp{self.context_index} "
            f"dp{self.data_index})"
        )

    @property
    def has_logits(self) -> bool:
        """On the last pipeline stage, where scores, credit and loss are."""
        return self.pipeline_index == self.pipeline_size - 1

    @property
    def reports(self) -> bool:
        """One rank of each replica speaks for its tensor- and context-parallel peers, which hold the same values."""
        return self.has_logits and self.tensor_index == 0 and self.context_index == 0
