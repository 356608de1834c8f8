"""Lets Megatron-core's mixture of experts run on a CPU; ``cpu_platform.install`` calls it.

Five places of Megatron-core (0.16.1 and 0.19.2) assume CUDA, NCCL or Transformer Engine. As in ``cpu_platform``, none
of the answers below changes a number.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class FinishedWork:
    """Stands for a CUDA stream, and for an event of it: on a CPU work is done when the call returns."""

    def wait_stream(self, other: object) -> None:
        """Work is already done."""

    def wait_event(self, event: object) -> None:
        """Work is already done."""

    def record_event(self, event: object = None) -> object:
        """An event that has happened."""
        return self if event is None else event

    def synchronize(self) -> None:
        """Work is already done."""


def install(stream: FinishedWork) -> None:
    """Prepares the dispatcher of tokens, the router and the collectives that experts need.

    Args:
        stream: what ``torch.cuda.current_stream`` returns.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    cuda: Any = torch.cuda
    # the dispatcher enters its stream; torch's own context asks the stream for its device
    cuda.stream = lambda *_: contextlib.nullcontext()
    # the dispatcher makes a torch.cuda.Stream unless its class has one
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    # it hands split sizes to torch.distributed as arrays, but converts those that come from a GPU only
    move = moe_utils.maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = functools.partial(_split_sizes, move)
    # 0.16.1 reads this name, and defines it only where Transformer Engine is installed
    vars(moe_utils).setdefault("te_general_gemm", None)
    # gloo gathers and scatters equal parts only, and the ranks that share an expert's matrices have unequal ones
    mappings._gather_along_first_dim = functools.partial(_gather, mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = functools.partial(
        _reduce_scatter, mappings._reduce_scatter_along_first_dim
    )


def _split_sizes(move: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return move(tensor, record_stream=record_stream)


def _gather(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: Any,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Gathers as Megatron does; parts of unequal length are padded to the longest."""
    if output_split_sizes is None or group.size() == 1:
        return original(input_, group, output_split_sizes, use_global_buffer)
    longest = max(output_split_sizes)
    padded = torch.cat([input_, input_.new_zeros(longest - len(input_), *input_.shape[1:])])
    parts = [torch.empty_like(padded) for _ in output_split_sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _reduce_scatter(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: Any,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Scatters sums as Megatron does; for parts of unequal length by a sum over all parts."""
    if input_split_sizes is None or group.size() == 1:
        return original(input_, group, input_split_sizes, use_global_buffer)
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return torch.split(total, list(input_split_sizes))[group.rank()].contiguous()
