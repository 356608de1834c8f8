"""What config.json says of Qwen3-Next, what is refused, and which layouts."""

import dataclasses

import pytest

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.request import request_from
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rollout.engine_checks import check_split
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet
from recipes.qwen3_next_80b_a3b import gtpo_64gpu
from tests.unit.companions.planner.requests import cluster
from tests.unit.weights.test_architecture import written

QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As in the hub's folder."""


def test_qwen3_next_is_read(tmp_path):
    arch = read_architecture(written(tmp_path, QWEN3_NEXT_80B))
    assert (arch.family, arch.qk_norm, arch.has_output_gate, arch.norms_from_one) == ("qwen3_next", True, True, True)
    assert (arch.rotary_size, arch.rope_theta) == (64, 1e7)
    assert arch.delta == DeltaNet(
        num_key_heads=16,
        num_value_heads=32,
        key_size=128,
        value_size=128,
        conv_size=4,
        layers=(True, True, True, False) * 12,
    )
    assert arch.experts == Experts(
        num_experts=512,
        experts_per_token=10,
        ffn_size=512,
        layers=(True,) * 48,
        shared_ffn_size=512,
        has_shared_gate=True,
        normalised=True,
    )
    shape = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]
    assert all(getattr(arch, field.name) == getattr(shape, field.name) for field in dataclasses.fields(shape))
    absent = dict.fromkeys(
        ("decoder_sparse_step", "full_attention_interval", "head_dim", "norm_topk_prob", "partial_rotary_factor")
    )
    assert read_architecture(written(tmp_path, QWEN3_NEXT_80B, **absent)) == arch
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert read_architecture(written(tmp_path, QWEN3_NEXT_80B, full_attention_interval=None, layer_types=kinds)) == arch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 48}, "expected 48, and both 'linear_attention' and 'full_attention'"),
        ({"layer_types": ["linear_attention"] * 48}, "expected 48, and both 'linear_attention' and 'full_attention'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 2 entries .* expected 48"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 24}, "layer_types has .*sliding_attention.* not "),
        ({"full_attention_interval": 1}, "both 'linear_attention' and 'full_attention'"),
        ({"linear_num_value_heads": 24}, "linear_num_key_heads=16 must divide linear_num_value_heads=24"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected from 2 to"),
        ({"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
    ],
)
def test_an_unusable_one_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(written(tmp_path, QWEN3_NEXT_80B, **changes))


def test_layouts_and_adapters_that_it_has_not_are_named(tmp_path):
    arch = read_architecture(written(tmp_path, QWEN3_NEXT_80B))
    arch.check_layout(
        ParallelConfig(num_ranks=8, tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=8)
    )
    arch.check_layout(ParallelConfig(num_ranks=2, context_parallel_size=2))
    with pytest.raises(
        ConfigError, match="gated delta nets shares heads, .*num_query_groups=2 and the delta nets' num_key"
    ):
        arch.check_layout(ParallelConfig(num_ranks=4, context_parallel_size=4))
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 must divide num_query_groups=2"):
        arch.check_layout(ParallelConfig(num_ranks=4, tensor_parallel_size=4, sequence_parallel=True))
    check_split(arch, RolloutConfig(tensor_parallel_size=8))
    with pytest.raises(ConfigError, match="rollout.tensor_parallel_size=32 must divide the 16 key heads of this model"):
        check_split(arch, RolloutConfig(tensor_parallel_size=32))
    adapted = dataclasses.replace(gtpo_64gpu(), adapter=AdapterConfig(rank=8, push="adapters"))
    with pytest.raises(ConfigError, match="adapters of q_proj travel merged .*; use push='merged'$"):
        request_from(adapted, cluster())


def test_one_without_experts_is_read_and_has_no_engine(tmp_path):
    """vLLM's class looks for a layer with experts and raises if there is none."""
    dense = QWEN3_NEXT_80B | {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3]}
    arch = read_architecture(written(tmp_path, dense))
    assert arch.experts is None
    with pytest.raises(ConfigError, match="vLLM has no delta nets without experts"):
        check_split(arch, RolloutConfig())


def test_engines_of_qwen3_5_ask_for_torchvision(tmp_path, monkeypatch):
    """Which vLLM's file of it imports; a dense one is welcome."""
    dense = QWEN3_NEXT_80B | {"architectures": ["Qwen3_5ForCausalLM"]}
    arch = read_architecture(
        written(tmp_path, {key: value for key, value in dense.items() if "expert" not in key and "moe" not in key})
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="vLLM's Qwen3.5 imports torchvision, which is not installed"):
        check_split(arch, RolloutConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_split(arch, RolloutConfig())
