"""Recipes from the command line: overrides of any field, hints on typos."""

import sys

import pytest

from gtpo_megatron.cli.recipe import load_recipe, parse
from gtpo_megatron.cli.train import TrainOptions
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError


def test_a_recipe_with_overrides():
    overrides = ["--num-steps", "3", "--run-dir", "here", "--resume"]
    overrides += ["--algorithm.alpha2", "0.2", "--rollout.group-size", "4"]
    options = parse("train", TrainOptions, ["recipes.tiny_cpu:gtpo", *overrides])
    assert options.config.num_steps == 3
    assert options.config.algorithm == GTPOConfig(alpha2=0.2)
    assert options.config.rollout.group_size == 4
    assert (options.run_dir, options.resume) == ("here", True)


def test_a_resolved_configuration_is_a_recipe_too(tmp_path):
    resolved = tmp_path / "config.yaml"
    resolved.write_text(to_yaml(load_recipe("recipes.tiny_cpu:dapo")), encoding="utf-8")
    options = parse("train", TrainOptions, [str(resolved), "--seed", "7"])
    assert (options.config.name, options.config.seed) == ("tiny_cpu_dapo", 7)
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("recipes.tiny_cpu", "must be written module:function"),
        ("recipes.nowhere:gtpo", "there is no module 'recipes.nowhere'"),
        ("recipes.tiny_cpu:ppo", r"recipes.tiny_cpu lacks it; it has .*grpo_s"),
        ("recipes.tiny_cpu:Path", "returned PosixPath, expected a RunConfig"),
        ("./mine.py:gtpo", "there is no file ./mine.py in /"),
        ("mine.py:gtpo", "there is no file mine.py in /"),
        ("./mine:gtpo", "a path without the ending .py; must be FILE.py:function"),
        (".:gtpo", "a path without the ending .py"),
        ("math:sqrt", "recipe 'math:sqrt': it raised TypeError"),
    ],
)
def test_a_recipe_that_is_none(recipe, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load_recipe(recipe)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "importing broken_recipe failed: RuntimeError: two lines$"),
        ("this is no Python", r"importing broken_recipe failed: SyntaxError: .*broken_recipe.py, line 1"),
        ("import nowhere_to_be_found", "failed: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def f(): return 1 / 0", "recipe 'broken_recipe:f': it raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_recipe_that_does_not_import(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken_recipe.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_recipe", raising=False)
    with pytest.raises(ConfigError, match=message) as refused:
        load_recipe("broken_recipe:f")
    assert len(str(refused.value).splitlines()) == 1
