"""Mistakes with mixtures of experts: one line before any process starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo_megatron.actor.model.expert_fields import expert_fields
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.experts import Experts
from recipes.tiny_cpu import ASSETS
from tests.unit.test_bad_input import complaint
from tests.unit.weights.test_reshard import architecture

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading

RECIPE = "recipes.tiny_cpu:moe_gtpo"
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 1,
}


def folder_with(tmp_path, **changes):
    """The tiny mixture with other sizes in its configuration."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny_qwen3_moe", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def fuse_experts(folder):
    """All experts of a layer in one tensor per projection, in a form that nobody writes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if ".experts.0." in name]
    for first in names:
        stacked = torch.stack([tensors.pop(first.replace(".experts.0.", f".experts.{i}.")) for i in range(8)])
        tensors[first.replace(".experts.0.", ".experts.").removesuffix(".weight")] = stacked
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--parallel.num-ranks", "3", "--parallel.expert-parallel-size", "3"],
            "expert_parallel_size=3 must divide num_experts=8",
        ),
        (
            [
                *("--parallel.num-ranks", "3", "--parallel.expert-parallel-size", "1"),
                *("--parallel.expert-tensor-parallel-size", "3"),
            ],
            "expert_tensor_parallel_size=3 must divide the experts' ffn_size=128",
        ),
        (["--parallel.expert-parallel-size", "4"], "must divide the 2 ranks of a pipeline stage"),
        (["--parallel.tensor-parallel-size", "2"], "need sequence_parallel=True"),
        (
            ["--rollout.expert-parallel", "--rollout.tensor-parallel-size", "2"],
            "rollout.expert_parallel=True: vLLM's experts on CPUs",
        ),
        (["--rollout.tensor-parallel-size", "3"], "must divide"),
        (
            [
                "--model.recompute",
                "experts",
                "--parallel.pipeline-parallel-size",
                "2",
                "--parallel.expert-parallel-size",
                "1",
            ],
            "model.recompute='experts' with update.routing_replay='rollout' and parallel.pipeline_parallel_size=2",
        ),
        (["--rollout.no-returns-routing"], "update.routing_replay='rollout' with rollout.returns_routing=False"),
        (["--balance.bias-update-rate", "0.1"], "bias_update_rate"),
        (["--model.path", str(ASSETS / "tiny_qwen2")], "this model is dense"),
    ],
)
def test_a_mistake_in_the_configuration(capsys, overrides, message):
    status, text = complaint(capsys, *overrides, recipe=RECIPE)
    assert status == 2
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts of a layer"),
        (GLM, "n_group=3 must divide the 8 experts of a layer"),
        ({"hidden_size": 144}, "hidden size 144: vLLM's experts on CPUs need a multiple of 32"),
        ({"num_experts": 4}, "num_experts=4 and num_local_experts=8 differ"),
    ],
    ids=["top-k", "groups", "hidden size", "numbers that differ"],
)
def test_a_model_that_cannot_be(capsys, tmp_path, changes, message):
    folder = folder_with(tmp_path, **changes)
    status, text = complaint(capsys, "--model.path", str(folder), recipe=RECIPE)
    assert status == 2
    assert message in text
    assert "Traceback" not in text


def test_a_folder_of_experts_fused_in_another_form(capsys, tmp_path):
    folder = folder_with(tmp_path)
    fuse_experts(folder)
    status, text = complaint(capsys, "--model.path", str(folder), recipe=RECIPE)
    assert status == 1
    assert (
        "may have been renamed to 'model.layers.0.mlp.experts.gate_proj'; config.json and weights must be of one model"
        in text
    )
    assert "Traceback" not in text


def test_no_router_is_fused():
    """Such a router would ask nobody which experts to replay; no configuration asks for one."""
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=8, layers=(True,) * 4)
    arch = architecture(family="qwen3_moe", experts=experts)
    for grouped in (False, True):
        assert expert_fields(arch, ParallelConfig(num_ranks=1), grouped=grouped)["moe_router_fusion"] is False
