"""The table of policies in docs/math_answers.md says what math_answer does."""

import re
from pathlib import Path

import pytest

import gtpo_megatron
from gtpo_megatron.rewards.math_answer import math_answer

DOCUMENT = Path(gtpo_megatron.__file__).parents[1] / "docs/math_answers.md"
ROW = re.compile(r"^\| `(?P<response>[^`|]+)` \| `(?P<reference>[^`|]+)` \| (?P<earns>[01]) \|", re.MULTILINE)
FOUND = [(row["response"], row["reference"], float(row["earns"])) for row in ROW.finditer(DOCUMENT.read_text("utf-8"))]


def test_the_table_is_found():
    assert len(FOUND) > 40


@pytest.mark.parametrize(("response", "reference", "earns"), FOUND)
def test_a_policy_is_what_the_table_says(response, reference, earns):
    assert math_answer(response, reference) == earns
