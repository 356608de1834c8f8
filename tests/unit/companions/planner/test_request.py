"""From a recipe to numbers, and what cannot be planned."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.hardware import GPUS
from gtpo_megatron.companions.planner.request import gpus_of, request_from
from gtpo_megatron.config.algorithm.base import OffPolicyConfig
from gtpo_megatron.errors import ConfigError
from recipes import deepseek_v3, qwen2_5_7b, qwen3_30b_a3b
from recipes.qwen2_5_32b import gtpo_64gpu
from recipes.qwen3_30b_a3b import gtpo_32gpu
from tests.unit.companions.planner.requests import cluster, request


def test_the_recipe_s_numbers():
    found = request_from(gtpo_64gpu(), cluster())
    assert found.batch.num_responses == found.batch.num_update_responses == 128 * 16
    assert found.batch.max_sequence_tokens == 2048 + 4096
    assert (found.engine.tensor, found.num_engines, found.weight_bytes) == (4, 16, 2)
    assert str(found.own_layout) == "TP4 PP4 DP4"


def test_mini_batches_and_updates():
    config = gtpo_64gpu()
    config = replace(config, update=replace(config.update, updates_per_rollout=4, mini_batch_prompts=32))
    found = request_from(config, cluster())
    assert (found.batch.num_updates, found.batch.num_update_responses) == (4, 32 * 16)


def test_the_recipe_s_layout_has_every_axis():
    config = gtpo_64gpu()
    parallel = replace(
        config.parallel,
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        virtual_pipeline_size=2,
        context_parallel_size=2,
        distributed_optimizer=False,
    )
    layout = request_from(replace(config, parallel=parallel), cluster()).own_layout
    assert str(layout) == "TP2 PP4 VPP2 CP2 DP4"
    assert layout.sequence_parallel
    assert not layout.distributed_optimizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 60}, "gpus=60: not a whole number of nodes of 8; take 56 or 64"),
        ({"num_gpus": 0}, "must be greater than 0"),
        ({"gpu_memory": 0.0}, "gpu_memory=0.0: must be greater than 0"),
        ({"gpu_memory": float("nan")}, "gpu_memory=nan"),
        ({"gpu_memory": float("inf")}, "gpu_memory=inf"),
        ({"host_memory": -1.0}, "host_memory=-1.0: must be 0 or more"),
        ({"num_rollout_gpus": 64}, "rollout_gpus=64: must be at least 0 .* less than gpus=64"),
        ({"num_rollout_gpus": -8}, "rollout_gpus=-8"),
    ],
)
def test_clusters_that_are_none(changes, message):
    with pytest.raises(ConfigError, match=message):
        cluster(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_tensor": 3}, r"tensor_parallel_size=3: must divide the 64 GPUs .* choose from \[1, 2, 4, 8\]"),
        ({"engine_tensor": 8, "num_gpus": 4}, r"must divide the 4 GPUs .* choose from \[1, 2, 4\]"),
        ({"model": "Qwen/Qwen2.5-33B"}, "perhaps you meant 'Qwen2.5-3"),
    ],
)
def test_requests_that_are_none(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)


def phi_4():
    config = qwen2_5_7b.gtpo_lora_1gpu()
    return replace(config, model=replace(config.model, path="microsoft/phi-4"))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (qwen2_5_7b.gtpo_lora_1gpu, {"targets": ("q_projj", "v_proj")}, "q_projj is no projection of this model"),
        (qwen2_5_7b.gtpo_lora_1gpu, {"rank": 100_000}, "rank=100000 exceeds 3584, the smaller side of q_proj"),
        (qwen3_30b_a3b.gtpo_lora_8gpu, {"targets": ("gate_proj",)}, "gate_proj is no projection .* experts.gate_up"),
        (phi_4, {"targets": ("q_proj",)}, "q_proj is no projection of this model .* it has qkv_proj, o_proj, gate_up"),
    ],
)
def test_adapters_that_a_run_would_refuse(make, changes, message):
    config = make()
    with pytest.raises(ConfigError, match=message):
        request_from(replace(config, adapter=replace(config.adapter, **changes)), cluster(num_gpus=8))


@pytest.mark.parametrize(
    ("make", "gpu", "message"),
    [
        (gtpo_64gpu, "h100", ""),
        (gtpo_32gpu, "b200", ""),
        (gtpo_64gpu, "a100", "dtype='fp8': these GPUs have no products in FP8"),
        (deepseek_v3.gtpo_256gpu, "h100", "dtype='fp8': vLLM has no models with latents in FP8"),
    ],
)
def test_engines_in_fp8_for_gpus_and_models_that_have_it(make, gpu, message):
    config = make()
    config = replace(
        config,
        rollout=replace(config.rollout, dtype="fp8", entropy_source="actor"),
        algorithm=replace(config.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
    )
    there = replace(cluster(num_gpus=config.parallel.num_ranks), gpu=GPUS[gpu])
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert request_from(config, there).engine.layer_bytes == 1


def test_a_layout_that_does_not_divide_the_model():
    config = gtpo_64gpu()
    for parallel, message in (
        ({"pipeline_parallel_size": 16, "virtual_pipeline_size": 8}, "must divide num_layers=64 of this model"),
        ({"pipeline_parallel_size": 4, "last_stage_layers": 14}, "last_stage_layers=14 of this model's 64"),
        (
            {"tensor_parallel_size": 16},
            "Qwen/Qwen2.5-32B: .*=16 must divide num_query_groups=8 .*choose",
        ),
    ):
        wrong = replace(config, parallel=replace(config.parallel, **{"pipeline_parallel_size": 1, **parallel}))
        with pytest.raises(ConfigError, match=message):
            request_from(wrong, cluster())


def with_experts(**parallel):
    config = gtpo_32gpu()
    return replace(config, parallel=replace(config.parallel, **parallel))


def test_the_recipe_s_experts_are_in_its_layout():
    found = request_from(
        with_experts(tensor_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True),
        cluster(num_gpus=32),
    )
    assert str(found.own_layout) == "TP2 PP2 CP2 EP8 ETP2 DP4"
    assert found.own_layout.expert_data == 1


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"num_ranks": 96, "expert_parallel_size": 48},
            r"expert_parallel_size=48 must divide num_experts=128 .*choose",
        ),
        (
            {"num_ranks": 80, "expert_parallel_size": 1, "expert_tensor_parallel_size": 5},
            r"expert_tensor_parallel_size=5 must divide the experts' ffn_size=768 .*choose from",
        ),
        ({"tensor_parallel_size": 2, "sequence_parallel": False}, "need sequence_parallel=True"),
    ],
)
def test_experts_that_cannot_be_shared_so(parallel, message):
    config = with_experts(**parallel)
    with pytest.raises(ConfigError, match=message):
        request_from(config, cluster(num_gpus=config.parallel.num_ranks))


def test_a_dense_model_has_no_experts_to_share():
    config = gtpo_64gpu()
    wrong = replace(config, parallel=replace(config.parallel, expert_parallel_size=4))
    with pytest.raises(ConfigError, match=r"Qwen2.5-32B: .*this model is dense, so expert_parallel_size .* must be 1"):
        request_from(wrong, cluster())


@pytest.mark.parametrize("imbalance", [0.5, float("nan"), float("inf")])
def test_a_busiest_rank_with_less_than_the_mean(imbalance):
    with pytest.raises(ConfigError, match=f"expert_imbalance={imbalance}: .* is at least 1"):
        replace(request(), expert_imbalance=imbalance)


def test_engines_that_share_experts_whole():
    config = gtpo_32gpu()
    wide = replace(config, rollout=replace(config.rollout, tensor_parallel_size=8, num_engines=4, expert_parallel=True))
    assert request_from(wide, cluster(num_gpus=32)).engine.expert_parallel
    wrong = replace(wide, rollout=replace(wide.rollout, tensor_parallel_size=24, num_engines=1))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=24: .* heads and experts .* choose from \[1, 2, 4, 8"):
        request_from(wrong, cluster(num_gpus=32))
    with pytest.raises(
        ConfigError, match="expert_parallel=True with tensor_parallel_size=1: one rank holds all experts"
    ):
        replace(wide.rollout, tensor_parallel_size=1)


def test_means_beyond_the_longest():
    for means in ({"mean_prompt_tokens": 3000.0}, {"mean_response_tokens": 5000.0}):
        with pytest.raises(ConfigError, match="at most the longest prompt's 2048 and the longest response's 4096"):
            request_from(gtpo_64gpu(), cluster(), **means)
    with pytest.raises(ConfigError, match="mean_response_tokens=-5"):
        request_from(gtpo_64gpu(), cluster(), mean_response_tokens=-5.0)


def test_sequences_longer_than_the_model_s():
    long = request()
    with pytest.raises(ConfigError, match="exceeds max_position_embeddings=131072"):
        replace(long, batch=replace(long.batch, max_sequence_tokens=200_000))


def test_engines_of_the_recipe_and_engines_that_fill_other_gpus():
    config = gtpo_64gpu()
    few = replace(config, rollout=replace(config.rollout, num_engines=2))
    assert request_from(few, cluster()).num_engines == 2
    assert request_from(few, cluster(num_gpus=32)).num_engines == 8
    apart = replace(
        few,
        rollout=replace(few.rollout, placement="disaggregated"),
        weight_sync=replace(few.weight_sync, transport="process_group"),
    )
    assert (gpus_of(few), gpus_of(apart)) == ((64, 0), (64, 8))


def test_gpus_that_nobody_uses():
    found = request_from(gtpo_64gpu(), cluster(num_gpus=72, num_idle_gpus=8))
    assert (found.cluster.num_trainer_gpus, found.cluster.num_engine_gpus, found.num_engines) == (64, 64, 16)
    assert str(found.own_layout) == "TP4 PP4 DP4"
    apart = cluster(num_gpus=72, num_rollout_gpus=4, num_idle_gpus=4)
    assert (apart.num_trainer_gpus, apart.num_engine_gpus) == (64, 4)
    with pytest.raises(ConfigError, match="or nothing would train"):
        cluster(num_gpus=8, num_rollout_gpus=4, num_idle_gpus=4)
