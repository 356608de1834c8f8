"""Where a rank is in the layout of the trainer: its coordinates and its process groups. Free of Megatron."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCoordinates:
    """A rank's index along every axis.

    Attributes:
        global_rank: rank in the trainer's world.
        tensor_index: index along the tensor-parallel axis.
        pipeline_index: index along the pipeline axis.
        context_index: index along the context-parallel axis.
        data_index: index along the data-parallel axis.
        pipeline_size: number of stages.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """This rank's group along every axis; None is an axis of size one.

    Attributes:
        tp: ranks that split every layer's matrices.
        cp: ranks that hold other tokens of the same sequences.
        dp: ranks that hold other rows of the same batch.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None


def gather_stacked(tensor: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Stacks the ranks' tensors of one shape in rank order: ``[tp, ...]``, without gradient.

    Collectives: one all-gather over ``tp_group``.
    """
    world_size = dist.get_world_size(tp_group)
    flat = tensor.detach().contiguous().view(-1)
    gathered = flat.new_empty((world_size * flat.numel(),))
    dist.all_gather_single(gathered, flat, group=tp_group)
    return gathered.view(world_size, *tensor.shape)
