"""A file of a person's own stands wherever ``module:function`` does, in every process."""

import hashlib
import subprocess
import sys

import pytest

from gtpo_megatron.cli.recipe import load_recipe, parse
from gtpo_megatron.cli.study import load_study
from gtpo_megatron.cli.train import TrainOptions
from gtpo_megatron.config.named_function import named_function, source_sha256
from gtpo_megatron.config.serialize import from_plain, load_config, to_plain, to_yaml
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.function import Form, resolve_final_answer, resolve_rewards

RECIPE = """
from dataclasses import replace

from gtpo_megatron.algorithms.registry import Algorithm
from gtpo_megatron.algorithms.credit.rloo import rloo_credit
from gtpo_megatron.algorithms.losses.reinforce import reinforce_loss
from gtpo_megatron.config.algorithm import RLOOConfig
from gtpo_megatron.config.configuration import configuration
from recipes import tiny_cpu, study as studies
from neighbour import STEPS


@configuration
class MyConfig(RLOOConfig):
    strength: float = 0.5


MINE = Algorithm(config=MyConfig, about="a test's", credit=rloo_credit, loss=reinforce_loss)


def gtpo():
    return replace(tiny_cpu.gtpo(), num_steps=STEPS)


def own():
    return replace(tiny_cpu.gtpo(), algorithm=MyConfig(strength=0.25))


def study():
    return studies.study()


def exact(response, answer):
    return float(response == answer)


def brief(completions, **columns):
    return [float(len(one) < 9) for one in completions]


def final_answer(response):
    return response[-1:]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    folder = tmp_path / "a folder of mine"
    folder.mkdir()
    (folder / "random.py").write_text(RECIPE, encoding="utf-8")  # a name that a module on the path has too
    (folder / "neighbour.py").write_text("STEPS = 7\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    monkeypatch.chdir(folder)
    return folder / "random.py"


@pytest.mark.parametrize(
    "form", ["{file}:gtpo", "./random.py:gtpo", "random.py:gtpo", "../a folder of mine/random.py:gtpo"]
)
def test_a_recipe_of_a_file(mine, form):
    assert load_recipe(form.format(file=mine)).num_steps == 7


def test_a_file_is_loaded_once_and_takes_no_modules_place(mine):
    first = named_function("random.py:exact", what="recipe", example="a:b")
    assert named_function(f"{mine}:exact", what="recipe", example="a:b") is first
    import random

    assert random.randint(1, 1) == 1


def test_rewards_of_a_file(mine):
    exact, brief = resolve_rewards(f"0.9*{mine}:exact + 0.1*./random.py:brief")
    assert (exact.form, exact.label, brief.form) == (Form.ANSWER, "exact", Form.COLUMNS)
    final_answer = resolve_final_answer("random.py:exact")
    assert final_answer is not None
    assert final_answer("so 7") == "7"


def test_a_study_of_a_file(mine):
    assert load_study("random.py:study").arms


@pytest.mark.slow
def test_an_algorithm_of_a_file_by_its_whole_path_in_every_process(mine, tmp_path):
    options = parse("train", TrainOptions, ["recipes.tiny_cpu:gtpo", "--algorithm", "random.py:MyConfig"])
    assert to_plain(options.config)["algorithm"]["kind"] == f"{mine}:MyConfig"
    config = parse("train", TrainOptions, ["random.py:own"]).config
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
    assert from_plain(to_plain(config), "here") == config
    # a process that has not loaded the file, in another folder
    script = (
        "import json, sys; from pathlib import Path; from gtpo_megatron.config.serialize import load_config;"
        "from gtpo_megatron.algorithms.registry import algorithm_of;"
        "mine = load_config(Path(sys.argv[1])).algorithm; print(mine.strength, algorithm_of(mine).about)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, "config.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.returncode) == ("0.25 a test's\n", 0), found.stderr


def test_what_a_file_lacks_is_said_with_what_it_has(mine):
    with pytest.raises(ConfigError, match=r"random.py lacks it; it has .*gtpo.*; did you mean \./random.py:gtpo\?"):
        load_recipe("./random.py:gtp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "importing broken.py failed: RuntimeError: two lines$"),
        ("this is no Python", r"importing broken.py failed: SyntaxError: .*broken.py, line 1"),
        ("import nowhere_to_be_found", "failed: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    ],
)
def test_a_file_that_does_not_import_and_is_mended(mine, text, message):
    file = mine.with_name("broken.py")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        load_recipe("broken.py:f")
    assert len(str(refused.value).splitlines()) == 1
    file.write_text("from recipes.tiny_cpu import gtpo as f  # mended\n", encoding="utf-8")
    assert load_recipe("broken.py:f").num_steps == 40


@pytest.mark.slow
def test_a_folder_that_hides_the_installed_recipes_is_named(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    for arguments in (["config", "recipes.tiny_cpu:gtpo"], ["quickstart"]):
        done = subprocess.run(
            [sys.executable, "-m", "gtpo_megatron.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert f"; recipes is {tmp_path}/recipes here: for a module in another folder" in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_source_of_a_function_is_its_file_as_it_is_now(tmp_path):
    file = tmp_path / "edited.py"
    found = []
    for text in ("one", "two", "one"):
        file.write_text(f"def name():\n    return {text!r}\n")
        found.append(source_sha256(f"{file}:name", what="function"))
    assert found[0] == found[2] != found[1]
    assert found[0] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert source_sha256("recipes.tiny_cpu:gtpo", what="recipe") != ""
    assert source_sha256("gtpo_megatron.rewards.math_answer:math_answer", what="reward function") == ""
    assert source_sha256("itertools:chain", what="function") == "", "it has no file"
    with pytest.raises(ConfigError, match="there is no file"):
        source_sha256(f"{tmp_path}/absent.py:name", what="function")
