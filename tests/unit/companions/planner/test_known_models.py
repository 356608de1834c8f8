"""Shapes by name, against published parameter counts; shapes from folders; names that are none."""

import json
from dataclasses import fields

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS, find_shape
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape
from recipes.tiny_cpu import ASSETS

# elements of the published safetensors; GLM's without the layer that predicts a second token, and without expert biases
# Seed-OSS, Moonlight, Kimi K2, GLM-4.7-Flash: the sum over the shapes on their cards, which say 36, 16, 1,000 and 30
# billion; DeepSeek's main model without the layer that predicts a second token, and without expert biases
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 751_632_384 - 151_936 * 1024,  # the hub counts the tied output layer, too
    "Qwen/Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Next-80B-A3B": 79_674_391_296,  # the sum over its class, below
    "zai-org/GLM-4.5-Air": 110_468_824_832 - 3_616_573_568 - 45 * 128,
    "zai-org/GLM-4.5": 358_337_791_296 - 5_539_962_272 - 89 * 160,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36_151_104_512,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200 - 58 * 256,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "moonshotai/Moonlight-16B-A3B": 15_960_108_544,
    "moonshotai/Kimi-K2": 1_026_408_209_408,
    "zai-org/GLM-4.7-Flash": 29_943_390_976,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "google/gemma-3-1b": 999_885_952,
    "google/gemma-3-27b": 27_009_346_304,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "ibm-granite/granite-3.3-8b-base": 8_170_848_256,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32_003_216_384,
    "rednote-hilab/dots.llm1.base": 142_774_381_696 - 61 * 128,
    "MiniMaxAI/MiniMax-M2": 228_689_764_864 - 62 * 256,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "openai/gpt-oss-20b": 20_914_757_184,  # of folders in bfloat16
    "openai/gpt-oss-120b": 116_829_156_672,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
}

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def folder(tmp_path, keys=QWEN3_30B_A3B, **changes):
    raw = {key: value for key, value in (keys | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_has_its_published_number_of_parameters(name):
    assert KNOWN_MODELS[name].num_parameters == PUBLISHED[name]


def test_the_layer_of_glm_that_is_left_out():
    """By hand: a layer with experts, its own embedding and output layer, a projection of two states, three norms."""
    for name, elements in (("zai-org/GLM-4.5-Air", 3_616_573_568), ("zai-org/GLM-4.5", 5_539_962_272)):
        shape = KNOWN_MODELS[name]
        layer = shape.common_parameters(LayerKind(has_experts=True))
        layer += shape.experts.num_experts * (shape.expert_parameters + 1)  # with its expert bias
        own = 2 * shape.vocab_size * shape.hidden_size + 2 * shape.hidden_size**2 + 3 * shape.hidden_size
        assert layer + own == elements


def test_a_model_with_delta_nets_has_the_parameters_of_its_class():
    shape = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]
    config = Qwen3NextConfig(num_experts=512, num_experts_per_tok=10, intermediate_size=5120, num_hidden_layers=48)
    with torch.device("meta"):
        model = Qwen3NextForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    experts = shape.experts.num_experts * shape.expert_parameters
    for number, layer in enumerate(model.model.layers):
        (kind, _), *others = shape.layers_between(number, number + 1)
        assert not others
        assert kind.has_delta_net == (config.layer_types[number] == "linear_attention")
        expected = sum(parameter.numel() for parameter in layer.parameters())
        assert shape.common_parameters(kind) + experts == expected
        mixer = layer.linear_attn if kind.has_delta_net else layer.self_attn
        matrices = [one for one in mixer.parameters() if one.ndim > 1]
        assert shape.attention_weights(kind) == sum(one.numel() for one in matrices)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Qwen/Qwen3-Next-80B-A3B", 3.87e9),  # with embeddings, as the others
        ("Qwen/Qwen3-30B-A3B", 3.35e9),
        ("Qwen/Qwen3-235B-A22B", 22.2e9),
        ("zai-org/GLM-4.5-Air", 13.4e9),
        ("zai-org/GLM-4.5", 33.6e9),
        ("deepseek-ai/DeepSeek-V3", 37.6e9),
        ("moonshotai/Kimi-K2", 32.9e9),
        ("Qwen/Qwen2.5-32B", PUBLISHED["Qwen/Qwen2.5-32B"]),
    ],
)
def test_a_token_passes_a_part_of_the_parameters(name, active):
    assert find_shape(name).num_active_parameters == pytest.approx(active, rel=0.01)


def test_some_layers_are_dense():
    shape = KNOWN_MODELS["zai-org/GLM-4.5"]
    dense, sparse = LayerKind(), LayerKind(has_experts=True)
    assert shape.num_expert_layers == 89
    assert (shape.layers_between(0, 4), shape.layers_between(4, 92)) == (((dense, 3), (sparse, 1)), ((sparse, 88),))
    assert KNOWN_MODELS["Qwen/Qwen2.5-32B"].layers_between(0, 64) == ((dense, 64),)


def test_tuned_variants_and_local_names_have_the_shape_of_their_base():
    base = KNOWN_MODELS["Qwen/Qwen2.5-32B"]
    for name in ("Qwen/Qwen2.5-32B-Instruct", "Qwen2.5-32B", "/models/Qwen2.5-32B"):
        assert find_shape(name) == base
    assert find_shape("Qwen/Qwen3-Next-80B-A3B-Instruct").delta is not None
    for name in ("Mistral-7B-Instruct-v0.3", "Mistral-Nemo-Instruct-2407", "Mistral-Small-24B-Instruct-2501"):
        assert find_shape(name) == find_shape(name.replace("-Instruct", "-Base"))
    assert find_shape("ByteDance-Seed/Seed-OSS-36B-Instruct") == KNOWN_MODELS["ByteDance-Seed/Seed-OSS-36B-Base"]


def test_a_folder_is_read():
    shape = find_shape(str(ASSETS / "tiny_qwen2"))
    raw = json.loads((ASSETS / "tiny_qwen2" / "config.json").read_text(encoding="utf-8"))
    assert (shape.num_layers, shape.vocab_size) == (raw["num_hidden_layers"], raw["vocab_size"])
    assert shape.qkv_bias


def test_folders_with_experts_are_read(tmp_path):
    def shape(architecture):
        return ModelShape(**{field.name: getattr(architecture, field.name) for field in fields(ModelShape)})

    assert shape(read_architecture(folder(tmp_path))) == KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
    assert shape(read_architecture(folder(tmp_path, GLM_4_5_AIR))) == KNOWN_MODELS["zai-org/GLM-4.5-Air"]
    assert read_architecture(folder(tmp_path, mlp_only_layers=[0, 1])).num_expert_layers == 46


def test_a_folder_goes_before_a_name(tmp_path):
    inside = tmp_path / "Qwen2.5-32B"
    inside.mkdir()
    assert find_shape(str(folder(inside, num_hidden_layers=2))).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts"),
        ({"architectures": ["MambaForCausalLM"], "num_experts": None, "moe_intermediate_size": None}, "Mamba"),
    ],
)
def test_a_folder_that_cannot_be_planned(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(folder(tmp_path, **changes))


def test_a_name_that_is_none_gets_a_suggestion():
    with pytest.raises(
        ConfigError, match=r"perhaps you meant 'Qwen2.5-7.?B'; a folder with nothing but .* known: .*Llama-3.1-70B"
    ):
        find_shape("Qwen/Qwen2.5-71B")
    with pytest.raises(ConfigError, match="neither a folder with a config.json nor"):
        find_shape("/nowhere")
