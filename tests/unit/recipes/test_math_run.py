"""Every recipe for mathematics with every method: the paper's numbers, one budget, and that it fits its GPUs."""

import importlib
import math
import pkgutil
import re
from dataclasses import replace
from pathlib import Path

import pytest

import recipes
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.recipe import load_recipe
from gtpo_megatron.config.algorithm import DAPOConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    NoLengthPenalty,
    SoftOverlongPenalty,
)
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, place
from recipes import qwen2_5_7b, qwen2_5_32b
from tests.plans import plan_of
from tests.yaml_text import from_yaml

KINDS = {"gtpo": GTPOConfig, "grpo_s": GRPOSConfig, "dapo": DAPOConfig, "grpo": GRPOConfig}
NODE_GIB = {
    "recipes.qwen3_235b_a22b": 2048,
    "recipes.gpt_oss_20b": 2048,
    "recipes.gpt_oss_120b": 2048,
    "recipes.deepseek_v3": 2048,
}
"""Host memory of a node of eight GPUs, by module: as a rule it has 1,024 GiB at least, and some recipes need more."""


def names(module_name):
    """What ``train`` can call in a module of recipes; warm starts are of another command."""
    module = importlib.import_module(f"recipes.{module_name}")
    return [
        f"{module.__name__}:{name}"
        for name, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__ and not name.startswith(("_", "sft"))
    ]


MODULES = sorted(
    {module.name for module in pkgutil.iter_modules(recipes.__path__)}
    - {"math_run", "code_run", "gsm8k_run", "precision_study", "smollm2_cpu", "staleness_study", "study", "tiny_cpu"}
    - {"calculator"}  # an environment
)
EVERY_RECIPE = [name for module in MODULES for name in names(module)]
ONE_OF_EACH = [
    pytest.param(name, marks=pytest.mark.slow if place == 0 else pytest.mark.nightly)
    for module in MODULES
    for place, name in enumerate(names(module))
]
"""One of each module before a commit."""
BY_METHOD = [name for name in EVERY_RECIPE if name.split(":")[1].startswith(tuple(KINDS)) and "published" not in name]


GPU = {"recipes.qwen2_5_0_5b": "rtx4090"}
"""Modules for other GPUs than H100s."""
SMALL = {"recipes.qwen2_5_0_5b", "recipes.qwen2_5_1_5b"}
"""Modules for one GPU."""


def plan(name):
    """On the GPUs and nodes that it is made for."""
    module = name.split(":")[0]
    host_gib = NODE_GIB.get(module, 128 if num_gpus(name) == 1 else 1024)
    return plan_of(name, "--host-memory", str(host_gib), "--gpu", GPU.get(module, "h100"))


def num_gpus(name):
    return int(re.search(r"_(\d+)gpu$", name).group(1))


def test_every_model_has_every_method_on_each_number_of_gpus():
    assert MODULES == [
        "deepseek_v3",
        "gpt_oss_120b",
        "gpt_oss_20b",
        "llama3_1_8b",
        "moonlight_16b_a3b",
        "qwen2_5_0_5b",
        "qwen2_5_1_5b",
        "qwen2_5_32b",
        "qwen2_5_72b",
        "qwen2_5_7b",
        "qwen3_235b_a22b",
        "qwen3_30b_a3b",
        "qwen3_32b",
        "qwen3_next_80b_a3b",
        "r1_distill_qwen_7b",
    ]
    assert len(EVERY_RECIPE) == 116
    found = {}
    for name in BY_METHOD:
        method = next(
            method for method in sorted(KINDS, key=len, reverse=True) if name.split(":")[1].startswith(method)
        )
        assert isinstance(load_recipe(name).algorithm, KINDS[method])
        found.setdefault((name.split(":")[0], num_gpus(name)), set()).add(method)
    assert len(found) == 19
    assert all(methods == set(KINDS) for methods in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_it_survives_the_run_folder_and_fills_the_gpus_in_its_name(name):
    config = load_recipe(name)
    assert from_yaml(to_yaml(config)) == config
    rollout, gpus = config.rollout, num_gpus(name)
    assert config.name.endswith(name.split(":")[1].removeprefix("math").removeprefix("paper"))
    assert config.parallel.num_ranks == rollout.num_engines * rollout.ranks_per_engine == gpus
    nodes = [
        ClusterNode(node_id=str(index), host=f"node {index}", num_gpus=min(8, gpus), num_cpus=96)
        for index in range(-(-gpus // 8))
    ]
    found = place(
        config.parallel,
        num_engines=rollout.num_engines,
        engine_gpus=rollout.ranks_per_engine,
        engine_nodes=rollout.nodes_per_engine,
        nodes=nodes,
        colocated=True,
    )
    assert set(found.ranks) == {node for engine in found.engines for node in engine} == set(nodes)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_planner_accepts_it(name):
    planned = plan(name)
    assert planned["cluster"]["num_gpus"] == num_gpus(name)
    assert planned["cluster"]["is_colocated"]
    own, choice = planned["own"], planned["choice"]
    assert own["fits"], own["reason"]
    assert sum(own["estimated_seconds"].values()) <= 1.2 * sum(choice["estimated_seconds"].values())
    config = load_recipe(name)
    assert planned["engine"]["num_engines"] == config.rollout.num_engines
    assert planned["engine"]["sequences_in_cache"] >= 16
    # the largest benchmark is one call; a real step takes about twice the estimate
    largest = (
        max(ADAPTERS[ref.name].num_problems for ref in config.evaluation.sets.values()) * config.evaluation.samples
    )
    a_response = own["estimated_seconds"]["generate"] / planned["batch"]["num_responses"]
    assert 2 * largest * a_response < config.cluster.stage_deadline_s


@pytest.mark.parametrize(
    ("name", "graders"), [("gtpo_lora_1gpu", 8), ("gtpo_8gpu", 16), ("gtpo_64gpu", 16), ("gtpo_code_8gpu", 32)]
)
def test_rewards_are_graded_by_more_processes_than_the_default_on_nodes_of_many_cores(name, graders):
    assert load_recipe(f"recipes.qwen2_5_7b:{name}").reward.num_workers == graders


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_data_sets_are_known_and_pinned(name):
    config = load_recipe(name)
    for dataset in (config.data.train, *config.evaluation.sets.values()):
        assert re.fullmatch("[0-9a-f]{40}", ADAPTERS[dataset.name].hub.revision)
        assert not dataset.revision
        assert not dataset.path
    if "code" in name:
        assert config.data.train_path == "taco"
        assert list(config.evaluation.sets) == ["humaneval", "mbpp", "livecodebench_v6"]
    elif name.split(":")[0] in SMALL:
        assert (config.data.train_path, list(config.evaluation.sets)) == ("gsm8k", ["gsm8k_test"])
    elif "published" not in name:
        assert list(config.evaluation.sets) == ["aime24", "aime25", "math500", "amc23", "minerva", "olympiadbench"]


@pytest.mark.parametrize("name", BY_METHOD)
def test_methods_share_the_budget(name):
    module_name, function = name.split(":")
    config = getattr(importlib.import_module(module_name), function)(num_steps=7, seed=3)
    method = next(method for method in sorted(KINDS, key=len, reverse=True) if function.startswith(method))
    assert (config.num_steps, config.seed) == (7, 3)
    gtpo = getattr(importlib.import_module(module_name), function.replace(method, "gtpo", 1))(num_steps=7, seed=3)
    assert config.name == gtpo.name.replace("_gtpo_", f"_{method}_")
    assert replace(config, algorithm=gtpo.algorithm, name=gtpo.name) == gtpo
    if module_name in SMALL:
        return
    # the paper's numbers hold for every model
    assert (config.data.prompts_per_step, config.rollout.group_size) == (128, 16)
    rate = 1e-5 if config.adapter.is_on else 1e-6
    assert (config.optimizer.learning_rate, config.update.updates_per_rollout) == (rate, 1)
    assert (config.rollout.sampling.temperature, config.rollout.sampling.top_p) == (1.0, 1.0)
    assert config.data.max_prompt_tokens == 2048
    length = re.search(r"_(\d+)k_", name)
    assert config.rollout.sampling.max_response_tokens == (1024 * int(length[1]) if length else 4096)


@pytest.mark.parametrize("recipe", [qwen2_5_32b.paper_64gpu, qwen2_5_7b.paper_64gpu, qwen2_5_7b.math_8gpu])
def test_the_methods_of_the_paper_s_tables(recipe):
    algorithms = {method: recipe(method).algorithm for method in KINDS}
    for method in ("gtpo", "grpo_s"):
        assert algorithms[method].formulation == "v6"
        assert (algorithms[method].clip_eps_low, algorithms[method].clip_eps_high) == (0.2, 0.28)
        assert isinstance(algorithms[method].length_penalty, GroupRelativeLengthPenalty)
        assert not algorithms[method].dynamic_sampling.enabled
    assert (algorithms["gtpo"].alpha1, algorithms["gtpo"].alpha2) == (1.0, 0.1)
    assert (algorithms["grpo_s"].beta1, algorithms["grpo_s"].beta2) == (1.0, 0.1)
    assert algorithms["dapo"].dynamic_sampling.enabled
    assert algorithms["dapo"].length_penalty == SoftOverlongPenalty(applies_to="all", buffer_tokens=512)
    assert isinstance(algorithms["grpo"].length_penalty, NoLengthPenalty)
    assert algorithms["grpo"].clip_eps_high == 0.2


def test_dapo_as_published():
    config = qwen2_5_32b.dapo_published_128gpu()
    sampling = config.rollout.sampling
    assert (config.data.prompts_per_step, config.rollout.group_size) == (512, 16)
    assert (config.update.updates_per_rollout, config.update.mini_batch_prompts * 16) == (16, 512)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_updates) == (1e-6, 320)
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.1, 1.0)
    assert (sampling.max_response_tokens, config.data.max_prompt_tokens) == (20480, 2048)
    assert config.algorithm.length_penalty == SoftOverlongPenalty(
        max_tokens=20480, buffer_tokens=4096, applies_to="all"
    )
    assert (config.evaluation.benchmarks, config.evaluation.samples) == (("aime24",), 32)
    assert (config.evaluation.sampling.temperature, config.evaluation.sampling.top_p) == (1.0, 0.7)


def test_a_name_that_is_none_lists_those_there_are(capsys):
    assert dispatch.run(["plan", "recipes.llama3_1_8b:gtpo"]) == 2
    assert "it has dapo_16gpu, grpo_16gpu, grpo_s_16gpu, gtpo_16gpu, math_16gpu" in capsys.readouterr().err


RECIPE_ROW = re.compile(
    r"^\| `(?P<name>recipes\.\w+:\w+gpu)` \|.*\| (?P<gpus>\d+)(?:, one node| of 24 GB| of 288 GB)? "
    r"\| (?P<gpu>\d+), (?P<host>\d+) \| (?P<s>\d+) \|$",
    re.MULTILINE,
)


@pytest.mark.slow
def test_the_table_of_recipes_says_what_the_planner_says():
    root = Path(recipes.__path__[0]).parent
    readme, table = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/recipes.md"))
    rows = list(RECIPE_ROW.finditer(table))
    shown = [row.group() for row in RECIPE_ROW.finditer(readme)]
    assert shown
    assert set(shown) <= {row.group() for row in rows}
    assert {row["name"].split(":")[0] for row in rows} == {f"recipes.{module}" for module in MODULES}
    for row in rows:
        own = plan(row["name"])["own"]
        found = (math.ceil(own["peak_bytes"] / 2**30), round(own["host_bytes"] / 2**30))
        assert (num_gpus(row["name"]), *found) == (int(row["gpus"]), int(row["gpu"]), int(row["host"])), row["name"]
        assert round(sum(own["estimated_seconds"].values())) == int(row["s"]), row["name"]
