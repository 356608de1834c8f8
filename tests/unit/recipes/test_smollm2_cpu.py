"""The recipes of SmolLM2: one setting, a reward, and a task whose held-out numbers were not trained on."""

import dataclasses
import json
import re

import pytest

from gtpo_megatron.config.serialize import to_yaml
from recipes import smollm2_cpu
from tests.yaml_text import from_yaml
from tools import make_word_problems
from tools.make_word_problems import ASSETS, HELDOUT_SHARE, SEED, pairs


def test_recipes_differ_in_their_algorithm_only():
    base = smollm2_cpu.gtpo()
    for make in (smollm2_cpu.grpo, smollm2_cpu.grpo_s, smollm2_cpu.dapo):
        config = make()
        assert dataclasses.replace(config, name=base.name, algorithm=base.algorithm) == base
        assert config.name == f"smollm2_cpu_{make.__name__}"
        assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("18", 1.0),
        ("5 + 13 = 18.", 1.0),
        ("18 or 17", 0.0),
        ("He has 118", 0.0),
        ("-18", 0.0),
        ("", 0.0),
        ("none", 0.0),
    ],
)
def test_the_last_number_is_the_answer(response, reward):
    assert smollm2_cpu.last_number(response, "18") == reward


def test_the_committed_problems_are_those_that_the_tool_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_word_problems.py", "--out", str(tmp_path)])
    make_word_problems.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


def test_no_held_out_pair_of_numbers_is_trained_on():
    train, heldout = pairs(SEED)
    assert len(heldout) == round(HELDOUT_SHARE * (len(train) + len(heldout)))
    found = {}
    for name, allowed in (("train", train), ("heldout", heldout)):
        rows = [json.loads(line) for line in (ASSETS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        questions = [row["prompt"][0]["content"] for row in rows]
        assert len(set(questions)) == len(rows)
        found[name] = set()
        for row, question in zip(rows, questions, strict=True):
            first, second = map(int, re.findall(r"\d+", question))
            is_sum = "gets" in question
            assert int(row["answer"]) == (first + second if is_sum else first - second) > 0
            assert (is_sum, first, second) in allowed
            found[name].add((is_sum, first, second))
    assert not found["train"] & found["heldout"]
