"""The planner's count of connections beside that of the push's own plan."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.hardware import COMMUNICATOR_BYTES
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.phases import engine_gpu, trainer_gpu
from gtpo_megatron.companions.planner.push_connections import rank_connections, worker_connections
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.push.plan import PushPlan
from gtpo_megatron.weights.reshard import shard_coordinates
from tests.unit.companions.planner.requests import request
from tests.unit.weights.push.test_parts_of_plan import layout_between
from tests.unit.weights.test_reshard import architecture

DENSE = {"num_layers": 8, "num_heads": 8, "num_query_groups": 8, "head_size": 8, "hidden_size": 64, "ffn_size": 256}
EXPERTS = Experts(num_experts=16, experts_per_token=2, ffn_size=64, layers=(True,) * 8)


def most_partners(arch, parallel, *, engine, engines, sender_policy, stages=1, expert_parallel=False):
    """Of one rank and of one worker, as the push has it; colocated, a worker is its rank."""
    shards = [shard_coordinates(parallel, rank) for rank in range(parallel.num_ranks)]
    layout = layout_between(
        arch,
        shards,
        engine=engine,
        engines=engines,
        sender_policy=sender_policy,
        bucket_bytes=1 << 20,
        expert_parallel=expert_parallel,
        stages=stages,
    )
    plan, pairs = PushPlan(arch, layout), set()
    first_worker = 0 if sender_policy == "own_rank_first" else parallel.num_ranks
    for target in layout.targets:
        me = first_worker + target.worker
        pairs |= {(rank, me) for spans in plan.spans(target.worker) for rank in spans if rank != me}
    known = [{a for a, b in pairs if b == one} | {b for a, b in pairs if a == one} for one in range(128)]
    return max(map(len, known[: parallel.num_ranks])), max(map(len, known[first_worker:]))


LAYOUTS = [{"tensor": tensor, "pipeline": pipeline} for tensor in (1, 2, 4, 8) for pipeline in (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dense_models(layout, engine):
    arch = architecture(vocab_size=1024, **DENSE)
    layout = Layout(num_ranks=64, **layout)
    parallel = ParallelConfig(num_ranks=64, tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
    asked = replace(request(engine_tensor=engine), transport="relay")
    actual, _ = most_partners(arch, parallel, engine=engine, engines=64 // engine, sender_policy="own_rank_first")
    assert actual <= rank_connections(asked, layout) <= 2 * actual + layout.pipeline
    asked = request(engine_tensor=engine, num_gpus=96, num_rollout_gpus=32)
    asked = replace(asked, transport="process_group", engine=replace(asked.engine, most=0))
    rank, worker = most_partners(arch, parallel, engine=engine, engines=32 // engine, sender_policy="anywhere")
    assert rank <= rank_connections(asked, layout) <= 2 * rank
    assert worker <= worker_connections(asked, layout) <= 2 * worker


@pytest.mark.parametrize("engine", [1, 4])
@pytest.mark.parametrize(
    "layout",
    [{"expert": 8}, {"expert": 4, "pipeline": 2, "tensor": 2}, {"expert": 4, "expert_tensor": 2, "tensor": 2}],
    ids=str,
)
def test_mixtures_of_experts(layout, engine):
    arch = architecture(vocab_size=1024, **DENSE | {"family": "qwen3_moe", "experts": EXPERTS})
    layout = Layout(num_ranks=32, **layout)
    parallel = ParallelConfig(
        num_ranks=32,
        tensor_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_parallel_size=layout.pipeline,
        expert_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    asked = replace(request("Qwen/Qwen3-30B-A3B", engine_tensor=engine, num_gpus=32), transport="relay")
    actual, _ = most_partners(arch, parallel, engine=engine, engines=32 // engine, sender_policy="own_rank_first")
    assert actual <= rank_connections(asked, layout) <= 2 * actual + layout.pipeline


@pytest.mark.parametrize(("tensor", "pipeline", "expert", "stages"), [(4, 4, 8, 2), (4, 8, 4, 2), (2, 2, 8, 4)])
def test_engines_of_stages(tensor, pipeline, expert, stages):
    """As DeepSeek-V3's: engines share experts whole, and each stage talks with the ranks of its layers."""
    arch = architecture(vocab_size=1024, **DENSE | {"family": "qwen3_moe", "experts": EXPERTS})
    layout = Layout(num_ranks=32, tensor=tensor, pipeline=pipeline, expert=expert)
    parallel = ParallelConfig(
        num_ranks=32,
        tensor_parallel_size=tensor,
        sequence_parallel=True,
        pipeline_parallel_size=pipeline,
        expert_parallel_size=expert,
    )
    asked = request("Qwen/Qwen3-30B-A3B", engine_tensor=4, num_gpus=32)
    engine = replace(asked.engine, stages=stages, nodes=stages, expert_parallel=True, most=0)
    asked = replace(asked, transport="relay", engine=engine)
    actual, _ = most_partners(
        arch,
        parallel,
        engine=4,
        engines=8 // stages,
        sender_policy="own_rank_first",
        stages=stages,
        expert_parallel=True,
    )
    assert actual <= rank_connections(asked, layout) <= 2 * actual + layout.pipeline


def test_connections_are_in_the_reserve():
    layout = Layout(num_ranks=64, tensor=4, pipeline=4)
    relay, memory = (replace(request(), transport=transport) for transport in ("relay", "shared_memory"))
    reserves = [trainer_gpu(one, layout, 0).phases["push"]["reserve"] for one in (relay, memory)]
    buckets = 0.05 * 4 * relay.bucket_bytes  # of what comes and goes, for fragmentation
    assert reserves[0] - reserves[1] == pytest.approx(3 * COMMUNICATOR_BYTES + buckets, abs=4)
    apart = request(num_gpus=96, num_rollout_gpus=32)
    apart = replace(apart, engine=replace(apart.engine, most=0))
    network, memory = (replace(apart, transport=transport) for transport in ("process_group", "shared_memory"))
    reserves = [engine_gpu(one, layout).phases["generate"]["reserve"] for one in (network, memory)]
    assert reserves[0] - reserves[1] == pytest.approx(4 * COMMUNICATOR_BYTES + buckets / 2, abs=4)
