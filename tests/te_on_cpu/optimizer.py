"""Adam, norms and scaling over lists of tensors; float32 inside."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_adam(
    chunk_size: int,
    skip: Tensor,
    lists: Sequence[Sequence[Tensor]],
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam, in place.

    Args:
        chunk_size: not read.
        skip: nothing is done if it is not zero.
        lists: gradients, parameters, first and second moments, and with master weights those in float32.
        learning_rate: of this step.
        beta1: of the first moment.
        beta2: of the second.
        eps: added to the root.
        step: counts from 1.
        mode: 1: weight decay is apart from the moments (AdamW); 0: it is added to the gradient.
        bias_correction: 1: moments are divided by ``1 - beta^step``.
        weight_decay: see ``mode``.
    """
    del chunk_size
    if int(skip):
        return
    first_part, second_part = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    gradients, parameters, firsts, seconds = lists[:4]
    masters = lists[4] if len(lists) > 4 else parameters
    for grad, parameter, first, second, master in zip(gradients, parameters, firsts, seconds, masters, strict=True):
        weight = master.float()
        change = grad.float() if mode else grad.float() + weight_decay * weight
        first.copy_(beta1 * first.float() + (1 - beta1) * change)
        second.copy_(beta2 * second.float() + (1 - beta2) * change * change)
        update = (first.float() / first_part) / ((second.float() / second_part).sqrt() + eps)
        if mode:
            update = update + weight_decay * weight
        weight = weight - learning_rate * update
        master.copy_(weight)
        parameter.copy_(weight)


def multi_tensor_l2norm(
    chunk_size: int, skip: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors as ``[1]`` float32, and of each if ``per_tensor``."""
    del chunk_size, skip
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm()[None], norms if per_tensor else torch.zeros(0)


def multi_tensor_scale_tensor(chunk_size: int, skip: Tensor, lists: Sequence[Sequence[Tensor]], scale: Tensor) -> None:
    """``lists[1] = scale * lists[0]``; ``skip`` becomes 1 if one of them is not finite."""
    del chunk_size
    for source, target in zip(*lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            skip.fill_(1)
        target.copy_(source.float() * scale)
