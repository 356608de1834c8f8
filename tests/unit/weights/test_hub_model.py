"""Models named as on the hub: from its cache, pinned to a commit, and what is said where they cannot be had."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gtpo_megatron.cli import convert
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.config.model import hub_name, is_hub_name
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.model_folder import model_folder, with_model_folder
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.hf.hub import cached_hub_folder
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two commits of a model in the cache, as ``hf download`` leaves them, and no network."""
    import huggingface_hub
    from huggingface_hub import constants, file_download, hf_api

    def no_network(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(hf_api.HfApi, "repo_info", no_network)
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True, raising=False)
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMITS[1])
    for commit in COMMITS:
        shutil.copytree(ASSETS / "tiny_qwen2", repository / "snapshots" / commit)
    return repository


def test_a_name_is_that_of_the_hub_unless_there_is_such_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B@main", f"a/b@{COMMITS[0]}"):
        assert is_hub_name(name)
    for name in ("models/Qwen2.5-7B", "runs/mine", "a", "a/b/c", "./a/b", "/a/b", "gguf:a/b", "../a", "a/b@", ""):
        assert not is_hub_name(name)
    (tmp_path / "Qwen" / "mine").mkdir(parents=True)
    assert not is_hub_name("Qwen/mine")
    assert hub_name("Qwen/Qwen3-8B@abc") == ("Qwen/Qwen3-8B", "abc")


def test_it_is_the_folder_of_a_commit_in_the_cache(cache):
    newest = cache / "snapshots" / COMMITS[1]
    assert model_folder("somebody/tiny") == newest
    assert model_folder(f"somebody/tiny@{COMMITS[0]}") == cache / "snapshots" / COMMITS[0]
    assert model_folder(str(newest)) is None
    run = tiny_cpu.gtpo()
    named = replace(run, model=replace(run.model, path="somebody/tiny"))
    assert with_model_folder(named).model.path == str(newest)


def test_so_is_what_is_converted(cache, tmp_path):
    arguments = ["hf-to-megatron", f"somebody/tiny@{COMMITS[0]}", str(tmp_path / "converted")]
    assert convert.run(arguments) == 0
    shape = read_architecture(tmp_path / "converted")
    assert shape == read_architecture(ASSETS / "tiny_qwen2")


def test_so_are_a_teacher_and_a_reference(cache):
    """Each is pinned to its own commit, and a run that is continued keeps both."""
    old, newest = (str(cache / "snapshots" / commit) for commit in COMMITS)
    run = tiny_cpu.distill()
    named = replace(run, teacher=replace(run.teacher, path="somebody/tiny"))
    assert with_model_folder(named).teacher.path == newest
    earlier = replace(run, teacher=replace(run.teacher, path=old))
    assert with_model_folder(named, earlier).teacher.path == old
    run = tiny_cpu.grpo_kl()
    named = replace(run, reference=replace(run.reference, path=f"somebody/tiny@{COMMITS[0]}"))
    found = with_model_folder(named)
    assert (found.reference.path, found.model.path) == (old, run.model.path)


def test_a_run_that_is_continued_keeps_its_commit(cache):
    run = tiny_cpu.gtpo()
    named = replace(run, model=replace(run.model, path="somebody/tiny"))
    earlier = replace(run, model=replace(run.model, path=str(cache / "snapshots" / COMMITS[0])))
    assert with_model_folder(named, earlier).model.path == earlier.model.path
    asked = replace(run, model=replace(run.model, path=f"somebody/tiny@{COMMITS[1]}"))
    assert with_model_folder(asked, earlier).model.path == str(cache / "snapshots" / COMMITS[1])
    assert with_model_folder(named, run).model.path == str(cache / "snapshots" / COMMITS[1])


def test_what_cannot_be_had_is_said_with_the_command(cache):
    with pytest.raises(ConfigError, match=r"cannot be had .*hf download nobody/none --local-dir FOLDER, and name that"):
        model_folder("nobody/none")
    with pytest.raises(ConfigError, match="hf download somebody/tiny --revision v2 --local-dir FOLDER"):
        model_folder("somebody/tiny@v2")


def test_what_a_plan_has_fetched_is_no_model(cache):
    for path in (cache / "snapshots" / COMMITS[1]).glob("*.safetensors"):
        path.unlink()
    assert cached_hub_folder("somebody/tiny") is None
    with pytest.raises(ConfigError, match="cannot be had from the Hugging Face hub"):
        model_folder("somebody/tiny")


def test_a_download_that_fails_is_no_reason_for_an_older_commit(cache, monkeypatch):
    import huggingface_hub

    newest = SimpleNamespace(sha="c" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: newest)
    with pytest.raises(ConfigError, match="cannot be had from the Hugging Face hub"):
        model_folder("somebody/tiny")


def test_a_plan_reads_the_configuration_alone(cache):
    for path in (cache / "snapshots" / COMMITS[1]).glob("*"):
        if path.name != "config.json":
            path.unlink()
    assert find_shape("somebody/tiny") == read_architecture(ASSETS / "tiny_qwen2")
    with pytest.raises(ConfigError, match=r"nor had from the Hugging Face hub \(\w+\); perhaps you meant 'Qwen2.5-7B'"):
        find_shape("nobody/Qwen2.5-8B")
