"""A model that thinks has the tokens for it, or its recipe says loudly that its responses are cut."""

import sys
from pathlib import Path

import pytest

import recipes
from gtpo_megatron.cli.recipe import load_recipe
from recipes.math_run import THINKING, THINKING_RESPONSE_TOKENS
from tests.unit.recipes.test_math_run import EVERY_RECIPE

GPT_OSS = "openai/gpt-oss-"
TABLE = Path(recipes.__path__[0]).with_name("docs") / "recipes.md"


@pytest.mark.parametrize("name", [name for name in EVERY_RECIPE if ":gtpo_" in name])
def test_thoughts_that_are_cut_are_said(name):
    config = load_recipe(name)
    model = config.model.path
    thinks = model.startswith(GPT_OSS) or (config.data.template_options == THINKING and not model.endswith("-Base"))
    is_cut = thinks and config.rollout.sampling.max_response_tokens < THINKING_RESPONSE_TOKENS
    row = next(line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |"))
    assert ("responses are cut" in row) == is_cut
    assert ("RESPONSES ARE CUT" in (sys.modules[name.partition(":")[0]].__doc__ or "")) == is_cut
