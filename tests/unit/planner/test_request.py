"""From a recipe to numbers, and what cannot be planned."""

from dataclasses import replace

import pytest

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.planner.request import gpus_of, request_from
from recipes.qwen2_5_32b import gtpo_64gpu
from tests.unit.planner.requests import cluster, request


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
        ({"model": "Qwen/Qwen2.5-33B"}, "perhaps you meant 'Qwen2.5-32B'"),
    ],
)
def test_requests_that_are_none(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)


def test_a_layout_that_does_not_divide_the_model():
    config = gtpo_64gpu()
    for parallel in ({"pipeline_parallel_size": 16, "virtual_pipeline_size": 8}, {"tensor_parallel_size": 16}):
        wrong = replace(config, parallel=replace(config.parallel, **{"pipeline_parallel_size": 1, **parallel}))
        with pytest.raises(ConfigError, match="does not divide Qwen/Qwen2.5-32B: 64 layers, 40 heads"):
            request_from(wrong, cluster())


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
