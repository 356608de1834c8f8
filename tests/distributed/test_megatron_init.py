"""On CPUs Megatron's groups of one rank are one, and each axis still has its own."""

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.config.parallel import ParallelConfig
from tests.dist_utils import run_processes


def members_and_sums(rank, world_size, init_method, config):
    """Ranks of every group that this rank is in, and the sum of ranks over two axes."""
    from megatron.core import parallel_state

    from gtpo_megatron.actor import megatron_init  # ranks have it already

    megatron_init.initialize(config, global_rank=rank, init_method=init_method, seed=1, collective_timeout_s=60)
    members = [tuple(sorted(dist.get_process_group_ranks(group))) for group in dist.distributed_c10d._world.pg_map]
    sums = []
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    ):
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    megatron_init.shut_down()
    return members, sums


@pytest.mark.megatron
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # Megatron warns of every optional kernel it lacks
def test_groups_of_one_rank_are_one():
    [(members, _)] = run_processes(members_and_sums, 1, ParallelConfig(num_ranks=1))
    assert members == [(0,)] * 2, "torch's own, and one for the twenty that Megatron asks for"
    for rank, (members, sums) in enumerate(
        run_processes(members_and_sums, 4, ParallelConfig(num_ranks=4, tensor_parallel_size=2), timeout_s=200)
    ):
        assert members.count((rank,)) == 1
        assert members.count((0, 1) if rank < 2 else (2, 3)) > 1, "what is under way may be so in any order"
        assert sums == [1.0 if rank < 2 else 5.0, 2.0 if rank % 2 == 0 else 4.0]
