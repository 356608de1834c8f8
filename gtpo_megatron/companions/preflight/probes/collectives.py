"""Collectives over the groups of a rank's layout: are results right, and how many bytes a second.

Every rank calls the same in the same order. Values are small integers, so that sums are exact.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gtpo_megatron.companions.preflight.probes.devices import wait_for
from gtpo_megatron.config.parallel import ParallelConfig

WARM_UP = 2
REPEATS = 7

Run = Callable[[Tensor, ProcessGroup], tuple[Tensor, Tensor]]
"""Runs a collective on this rank's tensor; returns what came out and what should have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisResult:
    """One group of a rank.

    Attributes:
        axis: ``tp``, ``cp``, ``dp``, ``pp``, ``ep`` or ``etp``.
        collective: name of the collective.
        ranks: global ranks of the group.
        num_bytes: size of a rank's tensor.
        sent_bytes: bytes that a rank of a ring sends for it.
        seconds: median over the repeats.
        is_right: whether every element was right.
    """

    axis: str
    collective: str
    ranks: tuple[int, ...]
    num_bytes: int
    sent_bytes: float
    seconds: float
    is_right: bool


def measure_collectives(_instance: object, parallel: ParallelConfig, sizes: dict[str, int]) -> list[AxisResult]:
    """Measures each axis of the layout that more than one rank shares; all ranks at once, after they have started.

    Args:
        parallel: the layout.
        sizes: bytes of a rank's tensor by axis.

    Collectives: those that it measures.
    """
    return [
        _measured(axis, name, run, group, sizes[axis], share)
        for axis, (name, run, group, share) in _axes(parallel).items()
        if group.size() > 1
    ]


def _axes(parallel: ParallelConfig) -> dict[str, tuple[str, Run, ProcessGroup, Callable[[int], float]]]:
    """By axis: name, collective, group, and the multiple of a tensor's bytes that each rank of a ring of n sends."""
    from megatron.core import parallel_state

    axes: dict[str, tuple[str, Run, ProcessGroup, Callable[[int], float]]] = {
        "tp": ("all-reduce", _all_reduce, parallel_state.get_tensor_model_parallel_group(), _reduced),
        "cp": ("send to the next rank", _ring, parallel_state.get_context_parallel_group(), _passed_on),
        "dp": (
            "all-reduce",
            _all_reduce,
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            _reduced,
        ),
        "pp": ("send to the next rank", _ring, parallel_state.get_pipeline_model_parallel_group(), _passed_on),
    }
    if parallel.expert_parallel_size > 1:
        group = parallel_state.get_expert_model_parallel_group()
        axes["ep"] = ("all-to-all", _all_to_all, group, _exchanged)
    if parallel.expert_tensor_parallel_size > 1:
        axes["etp"] = ("all-reduce", _all_reduce, parallel_state.get_expert_tensor_parallel_group(), _reduced)
    return axes


def _reduced(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _passed_on(_ranks: int) -> float:
    return 1.0


def _exchanged(ranks: int) -> float:
    return (ranks - 1) / ranks


def _measured(
    axis: str, name: str, run: Run, group: ProcessGroup, num_bytes: int, share: Callable[[int], float]
) -> AxisResult:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    size = group.size()
    elements = max(size, num_bytes // 4 // size * size)
    mine = torch.full((elements,), float(group.rank() + 1), device=device)
    times, is_right = [], True
    for repeat in range(WARM_UP + REPEATS):
        dist.barrier(group)
        wait_for(device)
        began = time.perf_counter()
        got, wanted = run(mine, group)
        wait_for(device)
        if repeat >= WARM_UP:
            times.append(time.perf_counter() - began)
        is_right = is_right and bool(torch.equal(got, wanted))
    num_bytes = 4 * elements
    return AxisResult(
        axis=axis,
        collective=name,
        ranks=tuple(dist.get_process_group_ranks(group)),
        num_bytes=num_bytes,
        sent_bytes=num_bytes * share(size),
        seconds=median(times),
        is_right=is_right,
    )


def _all_reduce(mine: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    total = mine.clone()
    dist.all_reduce(total, group=group)
    return total, torch.full_like(mine, group.size() * (group.size() + 1) / 2)


def _all_to_all(mine: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    got = torch.empty_like(mine)
    dist.all_to_all_single(got, mine, group=group)
    numbers = torch.arange(1, group.size() + 1, device=mine.device, dtype=mine.dtype)
    return got, numbers.repeat_interleave(len(mine) // group.size())


def _ring(mine: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Every rank sends to the next and receives from the one before."""
    ranks, place = dist.get_process_group_ranks(group), group.rank()
    there, back = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    got = torch.empty_like(mine)
    calls = [
        dist.P2POp(dist.isend, mine, there, group=group),
        dist.P2POp(dist.irecv, got, back, group=group),
    ]
    for call in dist.batch_isend_irecv(calls):
        call.wait()
    return got, torch.full_like(mine, float((place - 1) % len(ranks) + 1))
