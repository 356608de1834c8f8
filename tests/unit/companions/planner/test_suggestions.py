"""What is said to help does help."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.layout_plan import make_plan
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.companions.planner.suggestions import suggestions
from tests.unit.companions.planner.requests import request


def overrides(plan):
    """All but adapters, which are said to help last."""
    found = [text.split(":")[0] for text in plan.suggestions]
    assert not any("--adapter" in each for each in found[:-1])
    return [each for each in found if "--adapter" not in each]


@pytest.mark.slow
def test_a_cache_that_is_too_large():
    small = request(gpu_memory=40, micro_batch_tokens=16384)
    plan = make_plan(small)
    assert plan.choice is None
    assert plan.misses[0].overflow <= plan.misses[-1].overflow
    # half of it is still too much; smaller micro-batches alone do not help
    assert overrides(plan) == ["--rollout.kv-cache-mib 10240"]
    for gibibytes, fits in ((20, False), (10, True)):
        changed = replace(small, engine=replace(small.engine, cache_bytes=gibibytes << 30))
        assert (make_plan(changed).choice is not None) == fits


@pytest.mark.slow
def test_a_cache_that_would_hold_no_sequence_is_not_said_to_help():
    """300 MiB too much on every GPU, and a cache of 4 GiB, in which a sequence of full length has 3."""
    roomy = request(engine_tensor=2, gpu_memory=141)
    long = replace(roomy.batch, max_sequence_tokens=24576, max_response_tokens=22528)
    roomy = replace(roomy, engine=replace(roomy.engine, cache_bytes=4 << 30), batch=long)
    layouts = [replace(found.layout, recompute="full") for found in make_plan(roomy).fitting]
    fullest = min((assess(roomy, layout).worst for layout in layouts), key=lambda gpu: gpu.peak)
    assert fullest.peak_phase == "generate"
    tight = replace(roomy, cluster=replace(roomy.cluster, gpu_memory=fullest.peak - (300 << 20)))
    plan = make_plan(tight)
    assert (plan.choice, plan.sequences_in_cache) == (None, 1)
    assert overrides(plan)
    assert not any("kv-cache" in line for line in overrides(plan))
    assert make_plan(replace(tight, engine=replace(tight.engine, cache_bytes=2 << 30))).choice is None


@pytest.mark.slow
def test_micro_batches_that_are_too_large():
    plan = make_plan(request(num_gpus=16, micro_batch_tokens=1048576, engine_tensor=8))
    assert plan.choice is None
    assert overrides(plan)[0] == "--update.micro-batch-tokens 6144"
    assert make_plan(request(num_gpus=16, micro_batch_tokens=6144, engine_tensor=8)).choice is not None


@pytest.mark.slow
def test_several_savings_together_where_none_is_enough():
    both = request(num_gpus=16, micro_batch_tokens=1048576, engine_tensor=8, gpu_memory=66)
    plan = make_plan(replace(both, engine=replace(both.engine, cache_bytes=60 << 30)))
    assert plan.choice is None
    assert overrides(plan)[0] == "--update.micro-batch-tokens 6144 --rollout.kv-cache-mib 30720"


@pytest.mark.slow
def test_more_gpus_where_only_they_help():
    plan = make_plan(request("Qwen/Qwen2.5-72B", num_gpus=8, engine_tensor=8))
    assert plan.choice is None
    assert overrides(plan) == ["--gpus 32"]
    assert make_plan(request("Qwen/Qwen2.5-72B", num_gpus=32, engine_tensor=8)).choice is not None
    assert make_plan(request("Qwen/Qwen2.5-72B", num_gpus=16, engine_tensor=8)).choice is None


def test_part_of_a_node_grows_to_whole_nodes_with_every_saving():
    plan = make_plan(request(num_gpus=7, engine_tensor=1))  # a whole engine on every GPU, beside 40 GiB of cache
    assert plan.choice is None
    assert overrides(plan) == [
        "--gpus 56 --rollout.tensor-parallel-size 8 --rollout.num-engines 7 --update.micro-batch-tokens 6144 "
        "--rollout.kv-cache-mib 20480"
    ]


@pytest.mark.nightly
def test_wider_engines():
    plan = make_plan(request("Qwen/Qwen2.5-72B", num_gpus=128, num_rollout_gpus=64, engine_tensor=2))
    assert "--rollout.tensor-parallel-size 4 --rollout.num-engines 16" in overrides(plan)


def test_adapters_help_last():
    for name in ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"):
        plan = make_plan(request(name, num_gpus=1, engine_tensor=1, gpu_memory=141))
        assert plan.choice is None
        words = "--adapter.rank 32 --optimizer.learning-rate 1e-5"
        assert plan.suggestions[-1].startswith(words)


def test_nothing_helps_a_model_that_is_far_too_large():
    assert suggestions(request("Qwen/Qwen2.5-72B", num_gpus=1, engine_tensor=1, gpu_memory=8)) == []
