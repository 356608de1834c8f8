"""The options of a judge on the command line, and in the file of a run."""

from dataclasses import replace

import pytest

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe
from gtpo_megatron.config.serialize import from_plain, load_config, to_plain, to_yaml
from gtpo_megatron.errors import ConfigError

RECIPE = "recipes.tiny_cpu:gtpo"

GIVEN = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "a": [1, 2.5, None]}}


def with_judge(config, **judge):
    return replace(config, reward=replace(config.reward, judge=replace(config.reward.judge, **judge)))


def parsed(*arguments):
    options = RecipeOptions(config=load_recipe(RECIPE))
    return parse_options(RecipeOptions, list(arguments), program="config", default=options).config.reward.judge


def test_a_file_has_every_option_back(tmp_path):
    config = with_judge(
        load_recipe(RECIPE),
        temperature=None,
        token_limit_name="max_completion_tokens",
        request_options=GIVEN,
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    found = load_config(tmp_path / "config.yaml")
    assert found == config
    assert found.reward.judge.request_options == GIVEN


def test_the_command_line_has_them():
    judge = parsed(
        *("--reward.judge.temperature", "None", "--reward.judge.token-limit-name", "max_completion_tokens"),
        *("--reward.judge.request-options", '{"reasoning_effort": "low", "a": {"b": [1, null]}}'),
    )
    assert (judge.temperature, judge.token_limit_name) == (None, "max_completion_tokens")
    assert judge.request_options == {"reasoning_effort": "low", "a": {"b": [1, None]}}
    assert judge.chat_options == {**judge.request_options, "max_completion_tokens": 512}
    assert parsed("--reward.judge.temperature", "0.5").temperature == 0.5
    assert parsed() == load_recipe(RECIPE).reward.judge


@pytest.mark.parametrize("options", [{"n": 2}, {"a": float("inf")}, ["a"], None])
def test_a_file_with_others_is_refused(options):
    plain = to_plain(load_recipe(RECIPE))
    plain["reward"]["judge"]["request_options"] = options
    with pytest.raises(ConfigError, match="request_options"):
        from_plain(plain, "config.yaml")
