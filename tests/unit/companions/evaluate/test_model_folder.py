import shutil

import pytest

from gtpo_megatron.companions.evaluate.model_folder import check_can_sample, check_model_folder, model_fingerprint
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import read_architecture
from recipes.tiny_cpu import ASSETS


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(ASSETS / "tiny_qwen2", tmp_path / "model")


def test_the_tiny_model_is_one(folder):
    check_model_folder(folder)
    check_can_sample(read_architecture(folder), 512)
    with pytest.raises(ConfigError, match="= 513 exceeds the model's max_position_embeddings=512"):
        check_can_sample(read_architecture(folder), 513)


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
