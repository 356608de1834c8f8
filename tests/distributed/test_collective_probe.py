"""The preflight's collectives over every axis of a layout, on real gloo ranks."""

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from tests.dist_utils import run_processes

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

SIZES = dict.fromkeys(("tp", "cp", "dp", "pp", "ep", "etp"), 64 << 10)


def measured(rank, world_size, init_method, parallel, lie):
    from gtpo_megatron.actor import megatron_init
    from gtpo_megatron.companions.preflight.probes import collectives

    megatron_init.initialize(parallel, global_rank=rank, init_method=init_method, seed=0, collective_timeout_s=60.0)
    if lie and rank == 1:
        honest = collectives._all_reduce
        collectives._all_reduce = lambda mine, group: honest(mine + 1, group)
    found = collectives.measure_collectives(None, parallel, SIZES)
    megatron_init.shut_down()
    return found


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (
            {"num_ranks": 4, "pipeline_parallel_size": 2, "context_parallel_size": 2},
            {"cp": {(0, 1), (2, 3)}, "pp": {(0, 2), (1, 3)}, "dp": {(0, 1), (2, 3)}},
        ),
        (
            {"num_ranks": 4, "tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_tensor_parallel_size": 2},
            {"tp": {(0, 1), (2, 3)}, "dp": {(0, 2), (1, 3)}, "ep": {(0, 2), (1, 3)}, "etp": {(0, 1), (2, 3)}},
        ),
    ],
)
def test_every_axis_is_right_and_of_its_own_ranks(layout, groups):
    ranks = run_processes(measured, 4, ParallelConfig(**layout), False)
    found = {}
    for rank, results in enumerate(ranks):
        for result in results:
            assert result.is_right, result
            assert rank in result.ranks
            assert result.seconds > 0
            assert result.num_bytes == 64 << 10
            found.setdefault(result.axis, set()).add(result.ranks)
    assert found == groups


def test_a_rank_that_adds_something_is_found():
    ranks = run_processes(measured, 2, ParallelConfig(num_ranks=2, tensor_parallel_size=2), True)
    assert not all(result.is_right for results in ranks for result in results)
