"""The programming task: its rows are right, its splits disjoint, and the committed model knows some of it."""

import json
import random
from pathlib import Path

import pytest

from gtpo_megatron.rewards.code_tests import code_tests
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tools.make_programs import ASSETS, NUM_HELDOUT, NUM_TRAIN, SEED, make_splits, write_split
from tools.programs import KINDS, SHOWN_INPUTS, careless, sample_program, sample_solution


def rows(name):
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_and_its_text_agree(kind):
    rng = random.Random(1)
    programs = [program for program in (sample_program(rng) for _ in range(200)) if program.kind == kind]
    assert len(programs) > 10
    for program in programs:
        written = eval(program.text)
        assert [written(x) for x in range(25)] == [program(x) for x in range(25)]


def test_a_solution_is_right_unless_it_is_careless():
    rng, sandbox = random.Random(2), UnsafeSandbox()
    passed = {0.0: 0, 1.0: 0}
    for rate in passed:
        for _ in range(30):
            program = sample_program(rng)
            tests = {
                "fn_name": "f",
                "inputs": [[x] for x in range(5, 20)],
                "outputs": [program(x) for x in range(5, 20)],
            }
            response = sample_solution(program, rng, careless_rate=rate)
            columns = json.dumps({"tests": tests})
            passed[rate] += code_tests(RewardRequest(response=response, columns_json=columns, sandbox=sandbox)).value
    sandbox.close()
    assert passed[0.0] == 30
    assert passed[1.0] < 15
    assert careless(sample_program(rng), rng).kind in KINDS


def test_the_committed_rows_are_what_the_tool_writes(tmp_path):
    train, heldout = make_splits(NUM_TRAIN, NUM_HELDOUT, SEED)
    write_split(tmp_path / "train.jsonl", train, "programs-train")
    write_split(tmp_path / "heldout.jsonl", heldout, "programs-heldout")
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


def test_no_function_is_in_both_splits():
    train, heldout = make_splits(NUM_TRAIN, NUM_HELDOUT, SEED)
    values = [{tuple(program(x) for x in SHOWN_INPUTS) for program in split} for split in (train, heldout)]
    assert not values[0] & values[1]
    assert (len(values[0]), len(values[1])) == (NUM_TRAIN, NUM_HELDOUT)


def test_tests_are_of_inputs_that_the_prompt_does_not_show():
    for row in rows("heldout.jsonl"):
        prompt = row["prompt"][0]["content"]
        assert not any(f"f({x})=" in prompt for [x] in row["tests"]["inputs"])
        assert len(row["tests"]["inputs"]) >= 3


def test_the_model_is_small():
    folder = Path(ASSETS).parent / "tiny_coder"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3 << 20
