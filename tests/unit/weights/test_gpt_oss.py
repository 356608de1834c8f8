"""What config.json says of gpt-oss, what is refused, and which layouts."""

import dataclasses
import json
import math

import pytest

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import Experts
from tests.unit.weights.test_architecture import written

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""As in the hub's folder, less its quantization."""


def test_gpt_oss_is_read(tmp_path):
    arch = read_architecture(written(tmp_path, GPT_OSS_20B))
    assert (arch.family, arch.qkv_bias, arch.has_sinks, arch.head_size) == ("gpt_oss", True, True, 64)
    assert arch.windows == (128, 0) * 12
    assert arch.experts == Experts(
        num_experts=32, experts_per_token=4, ffn_size=2880, layers=(True,) * 24, normalised=True, clamp=7.0
    )
    assert arch.rope_scaling is not None
    assert not arch.rope_scaling.rounds_range
    assert arch.rope_scaling.attention_factor == 0.1 * math.log(32) + 1
    shape = KNOWN_MODELS["openai/gpt-oss-20b"]
    assert all(getattr(arch, field.name) == getattr(shape, field.name) for field in dataclasses.fields(shape))
    absent = {"attention_bias": None, "layer_types": None, "rope_theta": None, "sliding_window": None}
    assert read_architecture(written(tmp_path, GPT_OSS_20B, **absent, swiglu_limit=None)) == arch
    # as long as the context, which it is not longer than
    assert read_architecture(written(tmp_path, GPT_OSS_20B, sliding_window=131072)).windows == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq' are not read"),
        ({"attention_bias": False}, "attention_bias=False is not supported; expected True"),
        ({"layer_types": ["full_attention"] * 24}, "layer_types=.* is not supported; expected .'sliding_attention', "),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types=.* is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported; expected False"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported; expected 1e-05"),
        ({"swiglu_limit": 6.0}, "swiglu_limit=6 is not supported; expected 7, which vLLM has fixed"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1 is not supported; expected 1.702, which vLLM has fixed"),
        ({"rope_scaling": None}, "rope type 'default' is not supported; expected 'yarn'"),
        ({"rope_scaling": {**GPT_OSS_20B["rope_scaling"], "mscale": 1.0}}, "mscale is not supported here"),
        ({"num_local_experts": None}, "lacks num_experts"),
        ({"use_bias": True}, "use_bias=true is not supported"),
    ],
)
def test_an_unusable_gpt_oss_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(written(tmp_path, GPT_OSS_20B, **changes))


def test_gpt_oss_without_windows_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B | {"sliding_window": None}), encoding="utf-8")
    with pytest.raises(ConfigError, match="sliding_window=null is not supported; expected a number of tokens"):
        read_architecture(tmp_path)


def test_sinks_and_biases_refuse_layouts_by_name(tmp_path):
    arch = read_architecture(written(tmp_path, GPT_OSS_20B))
    arch.check_layout(
        ParallelConfig(num_ranks=8, tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=8)
    )
    shared = ParallelConfig(num_ranks=16, context_parallel_size=16)
    for windows, what in ((arch.windows, "a sliding window"), ((), "attention sinks")):
        told = f"model with {what} shares heads, .* must divide num_query_groups=8; choose from"
        with pytest.raises(ConfigError, match=told):
            dataclasses.replace(arch, windows=windows).check_layout(shared)
    cut = ParallelConfig(num_ranks=2, tensor_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="expert_tensor_parallel_size must be 1 for experts with biases"):
        arch.check_layout(cut)
