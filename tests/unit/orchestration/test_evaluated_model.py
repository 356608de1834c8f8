import shutil

import pytest

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.evaluated_model import find_model
from recipes.tiny_cpu import ASSETS

MODEL = ASSETS / "tiny_qwen2"


def test_a_model_folder_is_itself():
    found = find_model(MODEL, "", is_run=False)
    assert (found.folder, found.checkpoint) == (MODEL, "")


def test_a_run_has_its_export(tmp_path):
    with pytest.raises(ConfigError, match="has no exported model"):
        find_model(tmp_path, "", is_run=True)
    (tmp_path / "hf").mkdir()
    with pytest.raises(ConfigError, match=r"hf: neither a Hugging Face model folder"):
        find_model(tmp_path, "", is_run=True)
    shutil.copytree(MODEL, tmp_path / "hf", dirs_exist_ok=True)
    assert find_model(tmp_path, "", is_run=True).folder == tmp_path / "hf"


def test_a_model_folder_has_no_checkpoints():
    with pytest.raises(ConfigError, match="checkpoint='latest': .* is no run folder"):
        find_model(MODEL, "latest", is_run=False)
