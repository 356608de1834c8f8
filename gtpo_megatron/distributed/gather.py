"""The all-gather of the forward pass of vocabulary-parallel scoring."""

import torch.distributed as dist
from torch import Tensor


def gather_stacked(tensor: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Stacks the ranks' tensors of one shape in rank order: ``[tp, ...]``, without gradient.

    Collectives: one all-gather over ``tp_group``.
    """
    world_size = dist.get_world_size(tp_group)
    flat = tensor.detach().contiguous().view(-1)
    gathered = flat.new_empty((world_size * flat.numel(),))
    dist.all_gather_single(gathered, flat, group=tp_group)
    return gathered.view(world_size, *tensor.shape)
