"""Joins this process to the trainer's world and sets Megatron's parallel state."""

import datetime
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.distributed.groups import ParallelGroups, RankCoordinates


def initialize(
    config: ParallelConfig, *, global_rank: int, init_method: str, seed: int, collective_timeout_s: float
) -> RankCoordinates:
    """Starts torch.distributed and Megatron's parallel state.

    Args:
        config: the layout.
        global_rank: rank of this process.
        init_method: as torch.distributed understands it: ``tcp://host:port`` or ``file://path``.
        seed: seed of all random states.
        collective_timeout_s: after which a collective gives up on a rank that does not answer.

    Collectives: rendezvous of all ranks; creation of every group.
    """
    cpu_platform.install()
    from megatron.core import parallel_state, tensor_parallel

    if not cpu_platform.is_cpu():
        torch.cuda.set_device(global_rank % torch.cuda.device_count())
    timeout = datetime.timedelta(seconds=collective_timeout_s)
    dist.init_process_group(
        "gloo" if cpu_platform.is_cpu() else "nccl",
        init_method=init_method,
        rank=global_rank,
        world_size=config.num_ranks,
        timeout=timeout,
    )
    with cpu_platform.one_group_of_one_rank():
        parallel_state.initialize_model_parallel(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            # Megatron chooses the interleaved schedule if this is a number
            config.virtual_pipeline_size if config.virtual_pipeline_size > 1 else None,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(collective_timeout_s / 60)),
        )
    torch.manual_seed(seed)
    # libraries draw from these two, and checkpoints hold them: unseeded, no two runs would have the same
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state is what libraries draw from
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return RankCoordinates(
        global_rank=global_rank,
        tensor_index=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_index=parallel_state.get_pipeline_model_parallel_rank(),
        context_index=parallel_state.get_context_parallel_rank(),
        data_index=parallel_state.get_data_parallel_rank(),
        pipeline_size=config.pipeline_parallel_size,
    )


def parallel_groups(config: ParallelConfig) -> ParallelGroups:
    """This rank's groups, None for axes of size one."""
    from megatron.core import parallel_state

    def group(size: int, get: ProcessGroup) -> ProcessGroup | None:
        return get if size > 1 else None

    return ParallelGroups(
        tp=group(config.tensor_parallel_size, parallel_state.get_tensor_model_parallel_group()),
        cp=group(config.context_parallel_size, parallel_state.get_context_parallel_group()),
        dp=group(config.data_parallel_size, parallel_state.get_data_parallel_group()),
    )


def shut_down() -> None:
    """Leaves the world; harmless if none was joined, or if an engine in this process has left it already."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
