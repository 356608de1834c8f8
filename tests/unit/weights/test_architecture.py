"""What config.json says of a model, in every spelling that folders have, and what is refused."""

import json

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import LocalRope
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.model_shape import LatentAttention
from gtpo_megatron.weights.rope import RopeScaling
from gtpo_megatron.weights.weight_checks import check_same_architecture

RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

R1_DISTILL_QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
R1_DISTILL_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As in the hub's folder, less its quantization."""


def written(folder, base=RAW, **changes):
    raw = {key: value for key, value in (base | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_both_spellings_of_the_rotary_base_are_read(tmp_path):
    assert read_architecture(written(tmp_path, rope_theta=1e6)).rope_theta == 1e6
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read_architecture(written(tmp_path, rope_parameters=rope)).rope_theta == 5e5
    assert read_architecture(written(tmp_path)).rope_theta == 1e4


def test_the_shape_is_read(tmp_path):
    arch = read_architecture(written(tmp_path))
    assert (arch.head_size, arch.num_query_groups, arch.tied_embeddings, arch.qkv_bias) == (16, 2, True, True)
    assert (arch.qk_norm, arch.rope_scaling) == (False, None)
    assert arch.padded_vocab_size(8) == 104
    assert arch.padded_vocab_size(2, 128) == 256


def test_qwen3_has_a_head_size_of_its_own(tmp_path):
    qwen3 = {"architectures": ["Qwen3ForCausalLM"]}
    arch = read_architecture(written(tmp_path, **qwen3, head_dim=32, attention_bias=False))
    assert (arch.family, arch.head_size, arch.qk_norm, arch.qkv_bias) == ("qwen3", 32, True, False)
    assert read_architecture(written(tmp_path, **qwen3)).head_size == 128  # transformers' default, not 64 / 4


def test_the_deepseek_distillations_are_of_the_families_they_were_distilled_into(tmp_path):
    qwen = read_architecture(written(tmp_path, R1_DISTILL_QWEN_1_5B))
    assert (qwen.family, qwen.qkv_bias, qwen.tied_embeddings, qwen.rope_theta) == ("qwen2", True, False, 1e4)
    llama = read_architecture(written(tmp_path, R1_DISTILL_LLAMA_8B))
    assert (llama.family, llama.qkv_bias, llama.head_size, llama.rope_theta) == ("llama", False, 128, 5e5)
    assert llama.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, slow_turns=1.0, fast_turns=4.0, original_positions=8192
    )


def test_mistral_is_llama_with_a_window(tmp_path):
    mistral = R1_DISTILL_LLAMA_8B | {"architectures": ["MistralForCausalLM"], "head_dim": 64, "rope_scaling": None}
    raw = {key: value for key, value in mistral.items() if not key.endswith("_bias")} | {"sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    arch = read_architecture(tmp_path)
    assert (arch.family, arch.head_size, arch.qkv_bias, arch.tied_embeddings) == ("llama", 64, False, False)
    assert arch.windows == ()
    for window, found in ((512, 512), (None, 4096)):  # without the key transformers and vLLM have 4096
        arch = read_architecture(written(tmp_path, mistral, sliding_window=window))
        assert arch.windows == (found,) * 32
    arch.check_layout(ParallelConfig(num_ranks=2, tensor_parallel_size=2))
    arch.check_layout(ParallelConfig(num_ranks=4, tensor_parallel_size=2, context_parallel_size=2))
    with pytest.raises(ConfigError, match=r"model with a sliding window shares heads, .*choose from"):
        arch.check_layout(ParallelConfig(num_ranks=16, tensor_parallel_size=2, context_parallel_size=8))


def test_seed_oss_is_qwen2_with_a_head_size_of_its_own(tmp_path):
    seed = {"architectures": ["SeedOssForCausalLM"], "tie_word_embeddings": False}
    arch = read_architecture(written(tmp_path, **seed, attention_bias=True, attention_out_bias=False))
    assert (arch.family, arch.head_size, arch.qkv_bias, arch.qk_norm) == ("qwen2", 128, True, False)
    assert read_architecture(written(tmp_path, **seed)).qkv_bias  # transformers' default
    assert not read_architecture(written(tmp_path, **seed, attention_bias=False)).qkv_bias


def test_smollm3_does_not_rotate_every_layer(tmp_path):
    smol = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 9, "tie_word_embeddings": None}
    arch = read_architecture(written(tmp_path, **smol))  # as transformers reads it
    assert (arch.family, arch.rope_theta, arch.tied_embeddings, arch.unrotated_layers) == ("llama", 2e6, True, (3, 7))
    assert read_architecture(written(tmp_path, **smol, no_rope_layer_interval=3)).unrotated_layers == (2, 5, 8)
    listed = read_architecture(written(tmp_path, **smol, no_rope_layers=[0, 1] * 5, no_rope_layer_interval=3))
    assert listed.unrotated_layers == (0, 2, 4, 6, 8)
    with pytest.raises(ConfigError, match="no_rope_layers has 8 entries; expected 9, one a layer"):
        read_architecture(written(tmp_path, **smol, no_rope_layers=[1] * 8))
    assert read_architecture(written(tmp_path, no_rope_layers=[0] * 4)).unrotated_layers == ()  # Qwen2 looks at no list


SHORT = {"original_max_position_embeddings": 64}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2, 3, 5, 8, 9], "long_factor": [9.0] * 8}


def test_ernie_is_llama_that_rotates_neighbours(tmp_path):
    ernie = {"architectures": ["Ernie4_5ForCausalLM"], "tie_word_embeddings": None, "use_bias": False}
    arch = read_architecture(written(tmp_path, **ernie))  # as transformers reads it
    assert (arch.family, arch.head_size, arch.rope_theta, arch.tied_embeddings) == ("llama", 128, 5e5, True)
    assert arch.rotates_neighbours
    with pytest.raises(ConfigError, match="use_bias=true is not supported"):
        read_architecture(written(tmp_path, **ernie | {"use_bias": True}))


def test_phi_is_llama_in_fewer_tensors(tmp_path):
    from gtpo_megatron.actor.model.rotary import inverse_frequencies

    phi = {"architectures": ["Phi3ForCausalLM"], "tie_word_embeddings": False, "sliding_window": None}
    arch = read_architecture(written(tmp_path, **phi))  # Phi-4
    assert (arch.family, arch.head_size, arch.rotary_fraction, arch.rope_scaling) == ("phi3", 16, 1.0, None)
    assert arch.windows == read_architecture(written(tmp_path, **phi | {"sliding_window": None})).windows == ()
    assert read_architecture(written(tmp_path, **phi | {"sliding_window": 511})).windows == (511,) * 4  # Phi-3-mini-4k
    assert read_architecture(written(tmp_path, **phi | {"sliding_window": 512})) == arch  # as long as the context
    factors = {"short_factor": [1.0, 1.1, 1.5, 2, 3, 5], "long_factor": [7.0] * 6}
    mini = {"partial_rotary_factor": 0.75, "rope_scaling": LONG | factors}
    arch = read_architecture(written(tmp_path, **phi, **mini, original_max_position_embeddings=64))  # Phi-4-mini
    assert (arch.rotary_fraction, arch.rope_scaling.factors) == (0.75, (1.0, 1.1, 1.5, 2.0, 3.0, 5.0))
    assert (arch.max_positions, arch.for_sequences(64)) == (512, arch)
    longer = arch.for_sequences(65)
    stretched = inverse_frequencies(arch) * torch.tensor(factors["short_factor"]) / 7
    torch.testing.assert_close(inverse_frequencies(longer), stretched)
    check_same_architecture(tmp_path, longer)  # a reference policy's folder, of a run that takes long sequences


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def test_olmo_has_norms_behind_and_over_all_heads(tmp_path):
    olmo = {"architectures": ["Olmo2ForCausalLM"], "tie_word_embeddings": False}
    arch = read_architecture(written(tmp_path, **olmo))
    assert (arch.norm_placement, arch.qk_norm_spans_heads, arch.windows) == ("post", True, ())
    assert arch.qk_norm_sizes == (64, 32)
    olmo |= {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 64}
    arch = read_architecture(written(tmp_path, **olmo))  # as transformers reads it
    assert (arch.rope_theta, arch.windows, arch.local_rope) == (5e5, (64, 64, 64, 0), None)
    arch = read_architecture(written(tmp_path, **olmo, rope_scaling={"type": "yarn", **YARN}))
    assert arch.local_rope == LocalRope(5e5, (True, True, True, False))
    with pytest.raises(ConfigError, match="transformers takes 500000 for those with a window; write rope_parameters"):
        read_architecture(written(tmp_path, **olmo, rope_theta=1e6))
    with pytest.raises(ConfigError, match="layer_types has 3 entries; expected 4"):
        read_architecture(written(tmp_path, **olmo, layer_types=["sliding_attention"] * 3))


def test_exaone_does_not_rotate_beside_windows(tmp_path):
    exaone = {"architectures": ["Exaone4ForCausalLM"], "tie_word_embeddings": False}
    arch = read_architecture(written(tmp_path, **exaone, sliding_window=64, sliding_window_pattern=2))
    assert (arch.norm_placement, arch.windows, arch.unrotated_layers) == ("post", (64, 0, 64, 0), (1, 3))
    full = ["full_attention"] * 4
    with pytest.raises(ConfigError, match="transformers rotates no layer then, vLLM all of them"):
        read_architecture(written(tmp_path, **exaone, sliding_window=64, layer_types=full))


def test_gemma_scales_and_has_two_rotary_embeddings(tmp_path):
    gemma = {"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": None, "hidden_act": "gelu"}
    arch = read_architecture(written(tmp_path, **gemma))
    assert (arch.activation, arch.embedding_factor, arch.norms_from_one) == ("gelu_tanh", 8.0, True)
    assert (arch.tied_embeddings, arch.head_size, arch.score_scale) == (True, 256, None)
    gemma |= {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "sliding_window_pattern": 3}
    arch = read_architecture(written(tmp_path, **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert (arch.norm_placement, arch.score_scale, arch.windows) == ("sandwich", 1 / 16, (64, 64, 0, 64))
    assert (arch.rope_theta, arch.rope_scaling.factor) == (1e6, 8.0)
    assert arch.local_rope == LocalRope(1e4, (True, True, False, True))
    with pytest.raises(ConfigError, match="final_logit_softcapping=30.0 is not supported"):
        read_architecture(written(tmp_path, **gemma, final_logit_softcapping=30.0))


def test_granite_has_four_factors(tmp_path):
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.2}
    granite = {"architectures": ["GraniteForCausalLM"], "logits_scaling": 8.0, **factors}
    arch = read_architecture(written(tmp_path, **granite))
    found = (arch.embedding_factor, arch.score_scale, arch.residual_factor, arch.logit_factor)
    assert found == (12.0, 0.5, 0.2, 0.125)
    with pytest.raises(ConfigError, match="logits_scaling=0 must be more than 0"):
        read_architecture(written(tmp_path, **granite | {"logits_scaling": 0.0}))


def test_ministral_ends_where_queries_begin_to_grow(tmp_path):
    ministral = {"architectures": ["Ministral3ForCausalLM"], "tie_word_embeddings": False}
    rope = {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
    arch = read_architecture(written(tmp_path, **ministral, rope_parameters=rope))
    assert (arch.max_positions, arch.windows) == (128, ())
    assert arch.positions_said == "original_max_position_embeddings=128, beyond which queries grow with the position"
    with pytest.raises(ConfigError, match="lacks llama_4_scaling_beta"):
        read_architecture(written(tmp_path, **ministral, rope_parameters=rope | {"llama_4_scaling_beta": None}))
    with pytest.raises(ConfigError, match="rope type 'yarn' is missing"):
        read_architecture(written(tmp_path, **ministral))


ROPES = [
    {},
    {"rope_scaling": None, "rope_theta": 7e4},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 7e4},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e5}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "factor": 32.0}},
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "factor": 2.5}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "beta_fast": 16, "beta_slow": 2}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "attention_factor": 0.8, "truncate": False}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 1.0,
            "original_max_position_embeddings": 64,
        }
    },
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "attention_factor": 1.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "mscale": 0.707}},
    {"rope_parameters": {"type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": None}},
    {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
    {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6, "original_max_position_embeddings": 4096},
    {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 1e6, "original_max_position_embeddings": 4096},
    {
        "rope_scaling": LONG | {"short_factor": [1 + pair / 7 for pair in range(64)], "long_factor": [9.0] * 64},
        "original_max_position_embeddings": 64,
    },
    # no longer context than that of training
    {
        "rope_scaling": LONG | {"short_factor": [2.0] * 64, "long_factor": [9.0] * 64},
        "original_max_position_embeddings": 131072,
    },
    # both ends of the interpolated range are the last pair of elements
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.1, **YARN}},
]


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_equal_those_of_transformers(tmp_path, rope):
    from gtpo_megatron.actor.model.rotary import attention_factor, inverse_frequencies

    folder = written(tmp_path, R1_DISTILL_LLAMA_8B, rope_scaling=None, rope_theta=None)
    folder = written(tmp_path, json.loads((folder / "config.json").read_text()), **rope)
    config = transformers.LlamaConfig.from_pretrained(folder)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        expected = 1.0 / (theta ** (torch.arange(0, 128, 2).float() / 128))
    else:
        expected, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config)
        assert attention_factor(read_architecture(folder)) == pytest.approx(wanted_factor, rel=1e-15)
    assert torch.equal(inverse_frequencies(read_architecture(folder)), expected)


HUNYUAN = {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 64}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 8,
    "rotary_dim": 4,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' has no name table; known: Qwen2For"),
        ({"architectures": None}, "lacks architectures, by which vLLM goes"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures is 'Qwen2ForCausalLM', expected a list"),
        (
            {"architectures": ["PhiMoEForCausalLM"], "num_local_experts": 8},
            r"is a mixture of experts \(num_local_experts=8\) without a name table; known with experts: Qwen3MoeFor",
        ),
        ({"architectures": ["DeepseekForCausalLM"], "n_routed_experts": 256}, "is a mixture of experts"),
        ({"is_causal": False}, "is_causal=false is not supported"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32.* needs what is not there: sparse attention"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "not there: a cap on scores and logits"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"], "linear_num_key_heads": 5}, "=5 must divide"),
        ({"architectures": None, "model_type": "gemma3_text"}, "add the model's class$"),
        ({"architectures": ["CwmForCausalLM"], "rope_parameters": {"rope_theta": 1e6}}, "lacks layer_types"),
        (
            HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 1e300}},
            "alpha=1e.300 .* must lie between 1 and 1e.09",
        ),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 1e8}, "rope_theta": 1e305}, "base of infinity"),
        (
            {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_k": 6, "num_experts_per_tok": 4},
            "num_experts_per_tok=4 differ",
        ),
        (MINIMAX | {"num_experts": 16}, "num_local_experts=8 and num_experts=16 differ"),
        (MINIMAX | {"partial_rotary_factor": 1.0}, "partial_rotary_factor=1 and rotary_dim=4 of head_dim=8 differ"),
        ({"architectures": None, "model_type": "qwen3_moe"}, 'lacks architectures.* "architectures": ."Qwen3MoeFor'),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is",
        ),
        ({"architectures": ["KimiLinearForCausalLM"]}, "needs what is not there: Kimi delta attention"),
        ({"num_experts": 4}, "architecture 'Qwen2ForCausalLM' is a mixture of experts"),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 0}, "sliding_window is 0, expected from 1"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported; train with full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq' are not read"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias=true is not supported"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias=true is not supported"),
        (
            {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True},
            "attention_out_bias=true is not supported",
        ),
        ({"architectures": ["SeedOssForCausalLM"], "mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; expected 'silu'"),
        ({"rope_scaling": LONG}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 1}, "embeddings is 1, expected from 2"),
        ({"rope_scaling": LONG | {"short_factor": None}, **SHORT}, "lacks short_factor"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 7}, **SHORT}, "has 7 entries; expected 8 above 0, one a"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 7}, **SHORT}, "long_factor has 7 entries; expected 8"),
        ({"rope_scaling": LONG | {"short_factor": [0.0] * 8}, **SHORT}, "has 8 entries; expected 8 above 0, one a"),
        ({"rope_scaling": LONG | {"attention_factor": 1.2}, **SHORT}, "attention_factor of rope type 'longrope' is"),
        ({"rope_scaling": LONG | {"short_mscale": 1.1}, **SHORT}, "short_mscale of rope type 'longrope' is not"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "factor": 0.5}}, "factor is 0.5, expected from 1 to"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "factor": None}}, "lacks factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 0.5}},
            "beta_slow=1.0 must be .* at most beta_fast=0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": -1.0}},
            "attention_factor=-1.0 must be more",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported; expected 'default', 'lin"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected from 1"),
        ({"rope_scaling": "linear"}, "rope_scaling: is 'linear', expected an object"),
        ({"rope_scaling": ["linear"]}, "rope_scaling: is .'linear'., expected an object"),
        ({"layer_types": 3}, "layer_types is 3, expected a list"),
    ],
)
def test_an_unusable_config_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(written(tmp_path, **changes))


def test_multi_latent_attention_is_read(tmp_path):
    arch = read_architecture(written(tmp_path, DEEPSEEK_V3))
    assert arch.latents == LatentAttention(query_rank=1536, key_value_rank=512, rotated_size=64, value_size=128)
    assert (arch.head_size, arch.rotary_size, arch.num_query_groups, arch.max_positions) == (192, 64, 128, 163840)
    assert arch.experts.layers == (False,) * 3 + (True,) * 58
    assert (arch.experts.num_groups, arch.experts.groups_per_token, arch.experts.has_bias) == (8, 4, True)
    # 0.1 ln 40 + 1, once for queries and once for keys; not where they are rotated, as both factors are equal
    assert arch.rope_scaling.score_factor == pytest.approx(1.3688879454113936**2)
    assert arch.rope_scaling.attention_factor == 1.0
    # Kimi K2's interpolated range has both ends at one number of turns
    kimi = DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0}
    assert read_architecture(written(tmp_path, DEEPSEEK_V3, rope_scaling=kimi)).rope_scaling.fast_turns == 1.0
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"q_lora_rank": None}), encoding="utf-8")
    assert read_architecture(tmp_path).latents.query_rank is None


V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "lacks q_lora_rank, which is null where"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"rope_interleave": False}, "rope_interleave=false is not supported; expected true"),
        ({"num_key_value_heads": 64}, "num_key_value_heads=64 is not supported; expected 128"),
        (
            {"scoring_func": None},
            "scoring_func='softmax' is not supported; expected 'sigmoid' .where transformers left",
        ),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported; expected 'noaux_tc'"),
        ({"n_group": None}, "lacks n_group"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' is not supported; expected 'default' or 'yarn'",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.0}}, "attention_factor is not supported here"),
        ({"routed_scaling_factor": None}, "lacks routed_scaling_factor"),
        (V2_LITE | {"n_group": 8}, "n_group=8 with topk_method='greedy' is not supported; vLLM goes by n_group"),
        (V2_LITE | {"topk_method": "group_limited_greedy", "topk_group": None}, "lacks topk_group"),
        (V2_LITE | {"n_group": 1, "norm_topk_prob": True}, "norm_topk_prob=true is not supported; vLLM heeds it"),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"] + ["sparse"] * 60},
            "mlp_layer_types does not fit first_k_dense_replace=3",
        ),
    ],
)
def test_an_unusable_latent_model_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(written(tmp_path, DEEPSEEK_V3, **changes))


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no readable config.json"):
        read_architecture(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is \[\], expected an object"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("positions", "changes", "reaches"),
    [
        (131072, {"rope_scaling": {"rope_type": "yarn", **YARN}}, 131072),
        (200000, {"rope_scaling": {"rope_type": "yarn", **YARN}}, 131072),
        (32768, {"rope_scaling": {"type": "yarn", **YARN}}, 131072),  # as on the card of Qwen2.5
        (40960, {"rope_parameters": {"rope_type": "yarn", **YARN}}, 131072),  # as on the card of Qwen3
        (32768, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (32768, {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.0}}, 131072),
        (32768, {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, 131072),
        (32768, {"rope_scaling": {"type": "yarn", "factor": 2.5}, "original_max_position_embeddings": 4096}, 10240),
        (131072, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 131072),
        (4096, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
    ],
)
def test_how_far_a_model_reaches(tmp_path, positions, changes, reaches):
    """With YaRN so far as vLLM's table does, whatever is in the other field, which cards leave as it was or not."""
    found = read_architecture(written(tmp_path, max_position_embeddings=positions, **changes))
    assert found.max_positions == reaches
    assert str(reaches) in found.positions_said
