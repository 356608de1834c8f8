"""The command's manners: helpful on typos, one line on errors, a status that scripts can use."""

import pytest

from gtpo_megatron import cli
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.errors import ConfigError


def test_a_recipe_with_overrides():
    options = cli.resolve(
        "recipes.tiny_cpu:gtpo",
        ["--num-steps", "3", "--run-dir", "here", "--algorithm.alpha2", "0.2", "--resume", "--rollout.group-size", "4"],
    )
    assert options.config.num_steps == 3
    assert options.config.algorithm == GTPOConfig(alpha2=0.2)
    assert options.config.rollout.group_size == 4
    assert (options.run_dir, options.resume) == ("here", True)


def test_a_typo_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.resolve("recipes.tiny_cpu:gtpo", ["--num-step", "3"])
    assert stop.value.code == 2
    assert "--num-steps" in capsys.readouterr().err


def test_a_wrong_type_and_a_wrong_value_are_refused(capsys):
    for arguments, hint in ((["--num-steps", "many"], "num-steps"), (["--rollout.group-size", "1"], "group_size=1")):
        with pytest.raises((SystemExit, ConfigError)) as stop:
            cli.resolve("recipes.tiny_cpu:gtpo", arguments)
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
        cli.load_recipe(recipe)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, ""),
        (["tarin"], 2, "no command 'tarin'; there are train"),
        (["train"], 2, "train needs a recipe first"),
        (["train", "recipes.tiny_cpu:gtpo", "--model.path", "/nowhere"], 2, "model.path=/nowhere"),
        (["report", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_a_status(arguments, status, message, capsys):
    assert cli.run(arguments) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") <= 1


def test_an_interrupt_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "train", interrupted)
    assert cli.run(["train", "recipes.tiny_cpu:gtpo"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_help_is_not_an_error(capsys):
    assert cli.run(["--help"]) == 0
    assert "train RECIPE" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.run(["train", "--help"])
    assert stop.value.code == 0
    assert "lists every field" in capsys.readouterr().out
