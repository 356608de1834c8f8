"""Blocks of neighbours on GPUs, an even spread on CPUs, and clear words where it does not fit."""

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, in_order, place


def nodes(*gpus):
    return [ClusterNode(node_id=f"id{i}", host=f"node{i}", num_gpus=num, num_cpus=8) for i, num in enumerate(gpus)]


def hosts(placement):
    return [node.host for node in placement.ranks]


def test_cpu_ranks_spread_evenly_and_in_order():
    placement = place(ParallelConfig(num_ranks=5), num_engines=1, engine_gpus=1, nodes=nodes(0, 0))
    assert hosts(placement) == ["node0", "node0", "node0", "node1", "node1"]
    assert (placement.engines[0][0].host, placement.reward.host, placement.has_gpus) == ("node0", "node0", False)


def test_gpu_nodes_are_filled_and_the_engine_takes_what_is_left():
    placement = place(
        ParallelConfig(num_ranks=12, tensor_parallel_size=4), num_engines=1, engine_gpus=4, nodes=nodes(8, 8)
    )
    assert hosts(placement) == ["node0"] * 8 + ["node1"] * 4
    assert (placement.engines[0][0].host, placement.has_gpus) == ("node1", True)


def test_no_tensor_parallel_group_is_cut_by_a_nodes_edge():
    placement = place(
        ParallelConfig(num_ranks=8, tensor_parallel_size=4), num_engines=1, engine_gpus=1, nodes=nodes(6, 6)
    )
    assert hosts(placement) == ["node0"] * 4 + ["node1"] * 4
    assert placement.engines[0][0].host == "node0"


@pytest.mark.parametrize(
    ("num_ranks", "tensor", "engine_gpus", "gpus"),
    [(16, 4, 1, (8, 8)), (8, 8, 4, (8, 2)), (12, 4, 1, (6, 6)), (2, 1, 3, (2, 2))],
)
def test_too_few_gpus_are_said_before_anything_starts(num_ranks, tensor, engine_gpus, gpus):
    parallel = ParallelConfig(num_ranks=num_ranks, tensor_parallel_size=tensor)
    with pytest.raises(ConfigError, match=rf"need {num_ranks + engine_gpus} GPUs.*Ray has: node0 {gpus[0]}, node1"):
        place(parallel, num_engines=1, engine_gpus=engine_gpus, nodes=nodes(*gpus))


def test_the_drivers_node_comes_first_and_numbers_count_as_numbers():
    unsorted = [
        ClusterNode(node_id=host, host=host, num_gpus=8, num_cpus=8) for host in ("gpu10", "gpu9", "gpu2", "gpu1")
    ]
    assert [node.host for node in in_order(unsorted, first="gpu9")] == ["gpu9", "gpu1", "gpu2", "gpu10"]


def test_engines_take_what_is_left_and_may_be_on_several_nodes():
    placement = place(ParallelConfig(num_ranks=4), num_engines=3, engine_gpus=2, nodes=nodes(8, 2, 4))
    assert [node.host for (node,) in placement.engines] == ["node0", "node0", "node1"]
    with pytest.raises(ConfigError, match="num_engines=5 with tensor_parallel_size=2 need 14 GPUs"):
        place(ParallelConfig(num_ranks=4), num_engines=5, engine_gpus=2, nodes=nodes(8, 3, 1))
    assert len(place(ParallelConfig(num_ranks=2), num_engines=2, engine_gpus=1, nodes=nodes(0)).engines) == 2


def test_engines_on_the_ranks_gpus_need_no_others():
    placement = place(ParallelConfig(num_ranks=8), num_engines=4, engine_gpus=2, nodes=nodes(4, 4), colocated=True)
    assert [node.host for (node,) in placement.engines] == ["node0", "node0", "node1", "node1"]
    with pytest.raises(ConfigError, match="need 6 GPUs, those of an engine on one node"):  # the second is on both
        place(ParallelConfig(num_ranks=6), num_engines=2, engine_gpus=2, nodes=nodes(3, 3), colocated=True)


def test_engines_on_the_ranks_nodes_without_gpus():
    placement = place(ParallelConfig(num_ranks=4), num_engines=2, engine_gpus=2, nodes=nodes(0, 0), colocated=True)
    assert [node.host for (node,) in placement.engines] == ["node0", "node1"]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 lie on one node.*divisor of 1"):
        place(ParallelConfig(num_ranks=2), num_engines=1, engine_gpus=2, nodes=nodes(0, 0), colocated=True)


def test_an_engine_on_several_nodes_has_an_equal_part_on_each():
    """Beside ranks, on what they leave of different nodes; on their GPUs, where each part's ranks are on one node."""
    four = {"engine_gpus": 16, "engine_nodes": 2}
    apart = place(ParallelConfig(num_ranks=8), num_engines=2, nodes=nodes(8, 8, 8, 8, 8), **four)
    assert [[node.host for node in engine] for engine in apart.engines] == [["node1", "node2"], ["node3", "node4"]]
    shared = place(ParallelConfig(num_ranks=32), num_engines=2, nodes=nodes(8, 8, 8, 8), colocated=True, **four)
    assert [[node.host for node in engine] for engine in shared.engines] == [["node0", "node1"], ["node2", "node3"]]
    with pytest.raises(ConfigError, match=r"need 24 GPUs, those of an engine on 2 nodes; Ray has: node0 8, node1 4"):
        place(ParallelConfig(num_ranks=8), num_engines=1, nodes=nodes(8, 4), **four)
    with pytest.raises(ConfigError, match="those of an engine on one node"):  # 16 of one node's 8
        place(ParallelConfig(num_ranks=16), num_engines=1, engine_gpus=16, nodes=nodes(8, 8), colocated=True)


def test_an_engine_on_several_nodes_without_gpus():
    both = {"engine_gpus": 2, "engine_nodes": 2}
    placement = place(ParallelConfig(num_ranks=2), num_engines=2, nodes=nodes(0, 0, 0), **both)
    assert [[node.host for node in engine] for engine in placement.engines] == [["node0", "node1"]] * 2
    with pytest.raises(ConfigError, match=r"nodes_per_engine=2: Ray has 1 nodes"):
        place(ParallelConfig(num_ranks=2), num_engines=1, nodes=nodes(0), **both)
