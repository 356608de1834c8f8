"""What config.json says of a mixture of experts, in both families and spellings, and what is refused."""

import json
from dataclasses import replace

import pytest
import transformers

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rollout.engine_checks import check_split
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import Experts

COMMON = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
QWEN3 = COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
GLM4 = COMMON | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}


def read(folder, base, **changes):
    raw = {key: value for key, value in (base | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return read_architecture(folder)


def test_qwen3_moe(tmp_path):
    arch = read(tmp_path, QWEN3, norm_topk_prob=True)
    assert (arch.family, arch.qk_norm, arch.qkv_bias, arch.rotary_fraction) == ("qwen3_moe", True, False, 1.0)
    assert arch.experts == Experts(num_experts=8, experts_per_token=2, ffn_size=24, layers=(True,) * 4)
    assert read(tmp_path, QWEN3, num_experts=None, num_local_experts=8, norm_topk_prob=True) == arch
    assert not read(tmp_path, QWEN3).experts.normalised  # transformers' default


def test_layers_without_experts_are_those_of_transformers(tmp_path):
    for sizes in (
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3]},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ):
        arch = read(tmp_path, QWEN3, **sizes)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3, **sizes))
        assert arch.experts.layers == tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
        assert [arch.has_experts(number) for number in range(4)] == list(arch.experts.layers)


def test_glm4_moe(tmp_path):
    sizes = {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 1}
    switches = {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5}
    arch = read(tmp_path, GLM4, **sizes, **switches)
    assert (arch.family, arch.qk_norm, arch.qkv_bias) == ("glm4_moe", True, True)
    assert (arch.rotary_fraction, arch.rotary_size) == (0.5, 8)
    assert arch.experts == Experts(
        num_experts=8,
        experts_per_token=2,
        ffn_size=24,
        layers=(False, True, True, True),
        shared_ffn_size=48,
        score="sigmoid",
        normalised=True,
        scaling=2.5,
        has_bias=True,
        num_groups=4,
        groups_per_token=1,
    )
    plain = read(tmp_path, GLM4)
    assert (plain.qk_norm, plain.qkv_bias, plain.rotary_fraction) == (False, False, 0.5)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Glm4Moe"])
def test_what_transformers_writes_is_read(tmp_path, kind):
    base = QWEN3 if kind == "Qwen3Moe" else GLM4
    getattr(transformers, f"{kind}Config")(**base).save_pretrained(tmp_path)
    assert read_architecture(tmp_path) == read(tmp_path, base)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN3, {"num_experts": None}, "lacks num_experts"),
        (QWEN3, {"num_local_experts": 4}, "num_experts=8 and num_local_experts=4 differ"),
        (QWEN3, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts of a layer"),
        (QWEN3, {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts; give the folder of the dense"),
        (QWEN3, {"attention_bias": True}, "attention_bias=true is not supported"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (GLM4, {"n_group": 3}, "n_group=3 must divide the 8 experts"),
        (GLM4, {"n_group": 2, "topk_group": 3}, "topk_group=3 must not exceed it"),
        (
            GLM4,
            {"norm_topk_prob": False},
            "norm_topk_prob=false with .* sigmoid scores is not supported; expected true",
        ),
        (
            QWEN3,
            {"norm_topk_prob": True, "num_experts_per_tok": 1},
            "norm_topk_prob=true with num_experts_per_tok=1 and softmax scores is not supported; expected false",
        ),
        (
            GLM4,
            {"n_group": 8, "topk_group": 2},
            "n_group=8 of 8 experts is not supported; expected groups of at least 2",
        ),
        (
            GLM4,
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "exceeds the 2 experts of topk_group=1 groups",
        ),
        (GLM4, {"first_k_dense_replace": 4}, "no layer has experts"),
        (GLM4, {"partial_rotary_factor": 0.3, "head_dim": 10}, "rotates 3 elements; expected an even number"),
    ],
)
def test_an_unusable_mixture_is_named(tmp_path, base, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, base, **changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert_parallel_size": 3}, r"expert_parallel_size=3 must divide num_experts=8 .* \[1, 2, 4, 8\]"),
        ({"expert_tensor_parallel_size": 5}, r"expert_tensor_parallel_size=5 must divide the experts' ffn_size=24"),
        ({"tensor_parallel_size": 2}, "experts with tensor_parallel_size > 1 need sequence_parallel=True"),
    ],
)
def test_a_layout_that_does_not_divide_the_experts(tmp_path, sizes, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, QWEN3).check_layout(ParallelConfig(num_ranks=30, **sizes))


def test_a_layout_that_does_not_divide_the_shared_experts(tmp_path):
    arch = read(tmp_path, GLM4)
    odd = replace(arch, experts=replace(arch.experts, shared_ffn_size=25))
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 must divide the shared experts' ffn_size=25"):
        odd.check_layout(ParallelConfig(num_ranks=2, tensor_parallel_size=2, sequence_parallel=True))


@pytest.mark.parametrize("size", ["expert_parallel_size", "expert_tensor_parallel_size"])
def test_a_dense_model_has_no_experts_to_split(tmp_path, size):
    dense = COMMON | {"architectures": ["Qwen2ForCausalLM"], "moe_intermediate_size": None}
    with pytest.raises(ConfigError, match="this model is dense, so expert_parallel_size and expert_tensor"):
        read(tmp_path, dense).check_layout(ParallelConfig(num_ranks=2, **{size: 2}))


@pytest.mark.parametrize(
    ("base", "rollout", "message"),
    [
        (QWEN3, {"tensor_parallel_size": 16}, r"tensor_parallel_size=16 must divide the experts' ffn_size=24 .* 24\]"),
        (QWEN3, {"tensor_parallel_size": 3, "expert_parallel": True}, "=3 must divide num_experts=8 of this model"),
        (
            COMMON | {"architectures": ["Qwen3ForCausalLM"], "moe_intermediate_size": None},
            {"tensor_parallel_size": 2, "expert_parallel": True},
            "expert_parallel=True: this model is dense",
        ),
        (
            COMMON | {"architectures": ["Qwen3ForCausalLM"], "moe_intermediate_size": None},
            {"returns_routing": True},
            "returns_routing=True: this model is dense and has no routers",
        ),
    ],
)
def test_experts_that_do_not_split_over_an_engine(tmp_path, base, rollout, message):
    with pytest.raises(ConfigError, match=message):
        check_split(read(tmp_path, base), RolloutConfig(**rollout))
    check_split(read(tmp_path, base), RolloutConfig(tensor_parallel_size=2))
