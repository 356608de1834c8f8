"""The text part of folders whose models also see, as transformers saves them and as the hub has them."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.data.chat_template import stop_token_ids
from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.rollout.engine_arguments import llm_arguments
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.reader import WeightFolder
from gtpo_megatron.weights.hf.writer import copy_companions
from gtpo_megatron.weights.reshard import hf_shapes
from gtpo_megatron.weights.weight_checks import check_weights
from tests.unit.weights.seeing_models import SEEING, make_seeing_folder

pytestmark = pytest.mark.filterwarnings("ignore")


def engine_config(arch):
    """What an engine makes of a folder's configuration."""
    return llm_arguments(
        RolloutConfig(),
        arch,
        on_gpu=False,
        cache_mib=64,
        max_sequence_tokens=64,
        seed=0,
        reads_weights=True,
        adapter=AdapterConfig(),
    )["hf_overrides"]


@pytest.mark.parametrize("name", SEEING)
def test_it_reads_as_the_folder_of_text_that_it_has(tmp_path, name, caplog):
    model, text = make_seeing_folder(tmp_path / "seeing", name)
    text.save_pretrained(tmp_path / "text")
    arch = read_architecture(tmp_path / "seeing")
    assert arch.also_sees
    assert arch == read_architecture(tmp_path / "text")
    check_weights(tmp_path / "seeing", arch)
    assert "the text part alone is read" in caplog.text
    with WeightFolder(tmp_path / "seeing") as found, WeightFolder(tmp_path / "text") as expected:
        assert found.tensors.keys() == expected.tensors.keys()
        for tensor in hf_shapes(arch):
            assert torch.equal(found.whole(tensor), expected.whole(tensor)), tensor
    (tmp_path / "out").mkdir()
    copy_companions(tmp_path / "seeing", tmp_path / "out", dtype_name=None)
    exported = read_architecture(tmp_path / "out")
    assert exported == arch
    assert not exported.also_sees
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert type(config).__name__ == type(text.config).__name__
    ids = torch.arange(4, 12)[None]
    again = type(text)(config).float().eval()
    again.load_state_dict(text.state_dict())
    assert torch.equal(again(ids).logits, text(ids).logits)
    torch.testing.assert_close(model(input_ids=ids).logits, text(ids).logits, rtol=0, atol=1e-5)


def test_a_tensor_that_is_there_under_two_names_is_named(tmp_path):
    make_seeing_folder(tmp_path, "gemma3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("language_model.model.norm.weight"))
    save_file(tensors | {"model.norm.weight": tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMappingError, match=r"model.norm.weight and .*model.norm.weight are the same tensor"):
        WeightFolder(tmp_path)


def test_stretched_positions_stay(tmp_path):
    make_seeing_folder(tmp_path, "qwen2_5_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [2, 1, 1]}
    config["text_config"] |= {"rope_scaling": yarn, "rope_theta": 300.0, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert (arch.rope_scaling.kind, arch.rope_scaling.factor, arch.rope_theta) == ("yarn", 4.0, 300.0)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_ties_what_the_trainer_ties(tmp_path, name, tied):
    """Whole configurations of transformers' have their classes' defaults where the file has no key."""
    make_seeing_folder(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert arch.tied_embeddings is tied
    change = engine_config(arch)
    found = change(change(transformers.AutoConfig.from_pretrained(tmp_path)))
    assert found.tie_word_embeddings is tied
    assert found.architectures == [SEEING[name][-1]]


def test_an_engine_attends_to_everything_whatever_the_folder_asks_for(tmp_path):
    """Of Qwen's models for a million tokens, which transformers reads without their chunks."""
    config = transformers.Qwen2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    raw = config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dual_chunk_attention_config": {"chunk_size": 262144}}))
    whole = transformers.AutoConfig.from_pretrained(tmp_path)
    assert whole.dual_chunk_attention_config["chunk_size"] == 262144
    found = engine_config(read_architecture(tmp_path))(whole)
    assert not hasattr(found, "dual_chunk_attention_config")
    assert found.head_dtype == "float32"


def test_the_end_of_a_response_is_that_of_the_text(tmp_path):
    config = {"text_config": {"eos_token_id": [7, 9]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=5)) == [5, 7, 9]


def test_a_mistral_that_does_not_say_it_has_an_output_layer_of_its_own(tmp_path):
    make_seeing_folder(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings")
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path)
    assert not arch.tied_embeddings
    with WeightFolder(tmp_path) as weights:
        weights.check(hf_shapes(arch))


def test_other_models_are_as_they_were(tmp_path):
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="architecture 'LlavaForConditionalGeneration' has no name table"):
        read_architecture(tmp_path)
