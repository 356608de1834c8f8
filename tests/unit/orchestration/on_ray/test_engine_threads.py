"""Threads of an engine on CPUs: all cores that nobody else computes on, since Ray would give it one."""

from dataclasses import replace

import pytest

from gtpo_megatron.config.algorithm import OffPolicyConfig
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.orchestration.on_ray.environment import engine_threads
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, place
from recipes import tiny_cpu


@pytest.mark.parametrize(
    ("cores", "num_engines", "rollout", "threads"),
    [
        ((2,), 1, {}, 2),
        ((2,), 1, {"max_staleness": 1}, 1),  # both ranks compute while it samples
        ((16,), 1, {"max_staleness": 1}, 14),
        ((16,), 2, {}, 8),
        ((16,), 1, {"tensor_parallel_size": 4}, 4),
        ((2,), 3, {}, 1),
        ((16, 16), 2, {}, 8),  # engines are on the first node
    ],
)
def test_an_engine_has_its_share_of_the_cores(cores, num_engines, rollout, threads):
    base = tiny_cpu.gtpo()
    config = replace(
        base,
        rollout=replace(base.rollout, num_engines=num_engines, **rollout),
        algorithm=replace(base.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
    )
    nodes = [ClusterNode(node_id=f"id{i}", host=f"node{i}", num_gpus=0, num_cpus=num) for i, num in enumerate(cores)]
    placement = place(ParallelConfig(num_ranks=2), num_engines=num_engines, engine_gpus=1, nodes=nodes)
    assert engine_threads(config, placement, num_engines - 1) == threads
    asked = replace(config, cluster=replace(config.cluster, engine_threads=5))
    assert engine_threads(asked, placement, 0) == 5


def test_vllm_chooses_beside_a_gpu():
    nodes = [ClusterNode(node_id="id", host="node", num_gpus=8, num_cpus=96)]
    placement = place(ParallelConfig(num_ranks=2), num_engines=1, engine_gpus=1, nodes=nodes)
    config = replace(tiny_cpu.gtpo(), cluster=ClusterConfig())
    assert engine_threads(config, placement, 0) == 0
