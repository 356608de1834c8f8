"""Recipes from the command line: overrides of any field, hints on typos."""

import pytest

from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe, parse
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


def test_a_typo_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("train", TrainOptions, ["recipes.tiny_cpu:gtpo", "--num-step", "3"])
    assert stop.value.code == 2
    assert "--num-steps" in capsys.readouterr().err


def test_a_wrong_type_and_a_wrong_value_are_refused(capsys):
    for arguments, hint in ((["--num-steps", "many"], "num-steps"), (["--rollout.group-size", "1"], "group_size=1")):
        with pytest.raises((SystemExit, ConfigError)) as stop:
            parse("config", RecipeOptions, ["recipes.tiny_cpu:gtpo", *arguments])
        assert hint in capsys.readouterr().err + str(stop.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("recipes.tiny_cpu", "must be written module:function"),
        ("recipes.nowhere:gtpo", "there is no module 'recipes.nowhere'"),
        ("recipes.tiny_cpu:ppo", r"has no recipe 'ppo'; it has .*grpo_s"),
        ("recipes.tiny_cpu:Path", "returned PosixPath, expected a RunConfig"),
    ],
)
def test_a_recipe_that_is_none(recipe, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe)
