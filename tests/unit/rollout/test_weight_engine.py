"""The check of settings that no weight carries, over layers that look like vLLM's."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.architecture import LocalRope
from gtpo_megatron.weights.config_json import read_architecture
from recipes.tiny_cpu import ASSETS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # of vLLM's own imports

ARCH = read_architecture(Path(ASSETS / "tiny_qwen2"))


def model(eps=ARCH.norm_eps, base=ARCH.rope_theta, gated_eps=ARCH.norm_eps):
    root = torch.nn.Module()
    root.norm, root.rotary, root.other = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    root.norm.variance_epsilon, root.rotary.base, root.other.base = eps, base, "a class of that name"
    root.gated_norm = torch.nn.Module()
    root.gated_norm.eps = gated_eps
    root.rotary.register_buffer("cos_sin_cache", torch.ones(2))
    return root


def test_settings_of_the_folder_pass_and_others_name_the_layer():
    from gtpo_megatron.rollout.weight_engine import check_settings

    check_settings(model(), ARCH)
    check_settings(model(base=int(ARCH.rope_theta)), ARCH)
    with pytest.raises(WeightSyncError, match="layer norm has variance_epsilon=1e-05, the trainer 1e-06"):
        check_settings(model(eps=1e-5), ARCH)
    with pytest.raises(WeightSyncError, match="layer rotary has base=500000"):
        check_settings(model(base=5e5), ARCH)
    with pytest.raises(WeightSyncError, match="layer gated_norm has eps=1e-05, the trainer 1e-06"):
        check_settings(model(gated_eps=1e-5), ARCH)


def test_a_layer_may_have_a_rotary_embedding_of_its_own():
    from gtpo_megatron.rollout.weight_engine import check_settings

    arch = dataclasses.replace(ARCH, local_rope=LocalRope(5e4, (True, False)))
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList([model(base=5e4), model()])
    check_settings(root, arch)
    root.layers = torch.nn.ModuleList([model(base=5e4), model(base=5e4)])
    with pytest.raises(WeightSyncError, match="layer layers.1.rotary has base=50000.0, the trainer"):
        check_settings(root, arch)
