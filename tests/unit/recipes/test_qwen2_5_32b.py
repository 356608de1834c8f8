"""The paper's setting: the numbers that are the paper's, one budget for all methods, and that it fits."""

from dataclasses import replace

import pytest

from gtpo_megatron.config.algorithm import DAPOConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from gtpo_megatron.config.length_penalty import GroupRelativeLengthPenalty, NoLengthPenalty
from gtpo_megatron.config.serialize import from_yaml, to_yaml
from gtpo_megatron.planner.hardware import GIB, GPUS
from gtpo_megatron.planner.plan import make_plan
from gtpo_megatron.planner.request import Cluster, request_from
from recipes import qwen2_5_32b

RECIPES = {
    "gtpo": (qwen2_5_32b.gtpo_64gpu, GTPOConfig),
    "grpo_s": (qwen2_5_32b.grpo_s_64gpu, GRPOSConfig),
    "dapo": (qwen2_5_32b.dapo_64gpu, DAPOConfig),
    "grpo": (qwen2_5_32b.grpo_64gpu, GRPOConfig),
}


def test_the_paper_s_numbers():
    config = qwen2_5_32b.gtpo_64gpu()
    assert (config.parallel.num_ranks, config.data.prompts_per_step, config.rollout.group_size) == (64, 128, 16)
    assert (config.optimizer.learning_rate, config.update.updates_per_rollout) == (1e-6, 1)
    assert (config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens) == (2048, 4096)
    assert (config.rollout.sampling.temperature, config.rollout.sampling.top_p) == (1.0, 1.0)
    for method in ("gtpo", "grpo_s"):
        algorithm = qwen2_5_32b._algorithm(method)
        assert algorithm.formulation == "v6"
        assert (algorithm.clip_eps_low, algorithm.clip_eps_high) == (0.2, 0.28)
        assert isinstance(algorithm.length_penalty, GroupRelativeLengthPenalty)
    assert (config.algorithm.alpha1, config.algorithm.alpha2) == (1.0, 0.1)
    assert qwen2_5_32b._algorithm("dapo").dynamic_sampling.enabled
    assert isinstance(qwen2_5_32b._algorithm("grpo").length_penalty, NoLengthPenalty)


@pytest.mark.parametrize("method", RECIPES)
def test_methods_share_the_budget_and_survive_the_run_folder(method):
    recipe, kind = RECIPES[method]
    config = recipe(num_steps=7, seed=3)
    assert isinstance(config.algorithm, kind)
    assert (config.num_steps, config.seed) == (7, 3)
    reference = qwen2_5_32b.gtpo_64gpu(num_steps=7, seed=3)
    assert replace(config, algorithm=reference.algorithm, name=reference.name) == reference
    assert qwen2_5_32b.paper_64gpu(method, num_steps=7, seed=3) == config
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("method", RECIPES)
def test_every_recipe_fits_64_gpus_of_80_gb(method):
    cluster = Cluster(gpu=GPUS["h100"], num_gpus=64, gpu_memory=80 * GIB, host_memory=1024 * GIB)
    plan = make_plan(request_from(RECIPES[method][0](), cluster))
    assert plan.own is not None
    assert plan.own.fits, plan.own.reason()
