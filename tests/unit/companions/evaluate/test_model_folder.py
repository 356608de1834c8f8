import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo_megatron.companions.evaluate.model_folder import check_model_folder, model_fingerprint
from gtpo_megatron.errors import ConfigError
from recipes.tiny_cpu import ASSETS


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(ASSETS / "tiny_qwen2", tmp_path / "model")


def test_the_tiny_model_is_one(folder):
    check_model_folder(folder)


def test_what_is_no_model(tmp_path, folder):
    with pytest.raises(ConfigError, match="no such folder"):
        check_model_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"neither a Hugging Face model folder .* nor a run folder"):
        check_model_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        check_model_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        check_model_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: is \[\], expected an object"):
        check_model_folder(folder)


def test_a_fingerprint_tells_models_apart_and_not_folders(folder, tmp_path):
    first = model_fingerprint(folder)
    assert model_fingerprint(shutil.copytree(folder, tmp_path / "elsewhere")) == first
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    second = model_fingerprint(folder)
    (folder / "chat_template.jinja").write_text("another")
    assert len({first, second, model_fingerprint(folder)}) == 3


@pytest.fixture
def large(folder):
    """A single file of several MiB, of tensors small and large."""
    tensors = {f"layer.{i}.large": torch.randn(700, 1024) for i in range(3)} | {"layer.1.bias": torch.zeros(3)}
    save_file(tensors | {"empty": torch.zeros(0)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["layer.0.large", "layer.1.large", "layer.1.bias", "layer.2.large"])
def test_a_fingerprint_tells_models_apart_that_differ_in_one_tensor(large, name):
    before = model_fingerprint(large)
    tensors = load_file(large / "model.safetensors")
    tensors[name] += 1e-3
    save_file(tensors, large / "model.safetensors")
    assert model_fingerprint(large) != before


def test_a_file_of_another_format_is_sampled_all_over(folder):
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    content = bytearray(40 << 20)
    weights.write_bytes(content)
    before = model_fingerprint(folder)
    content[20 << 20 : (20 << 20) + (64 << 10)] = b"x" * (64 << 10)
    weights.write_bytes(content)
    assert model_fingerprint(folder) != before


def test_a_weights_file_without_its_end_or_with_no_header_is_said(large):
    weights = large / "model.safetensors"
    content = weights.read_bytes()
    for damaged, said in (
        (content[:-1], r"model\.safetensors: is cut short or damaged: has a tensor at \d+ to"),
        (content[:100], r"model\.safetensors: is no safetensors file, or cut short"),
        (b"", r"model\.safetensors: is no safetensors file, or cut short"),
        (content[:8] + b"!" + content[9:], r"model\.safetensors: its header: not valid JSON"),
    ):
        weights.write_bytes(damaged)
        with pytest.raises(ConfigError, match=said):
            model_fingerprint(large)
