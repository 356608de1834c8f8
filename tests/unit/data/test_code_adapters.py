"""Rows of the published sets' shapes, written here, become problems that the reward can grade."""

import json

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.hub import read_hub
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.code_tests import code_tests
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.sandbox.unsafe import UnsafeSandbox

ROWS = {
    "humaneval": (
        {
            "task_id": "HumanEval/7",
            "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    '''The sum.'''\n",
            "canonical_solution": "    return sum(xs)\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
            "entry_point": "total",
        },
        "def total(xs: List[int]) -> int:\n    return sum(xs)",
    ),
    "mbpp": (
        {
            "task_id": 11,
            "text": "Write a function to double.",
            "code": "no",
            "test_list": ["assert double(2) == 4", "assert double(a) == 6"],
            "test_setup_code": "a = 3",
            "challenge_test_list": [],
        },
        "def double(x): return 2 * x",
    ),
    "livecodebench-v6": (
        {
            "question_title": "Sum",
            "question_content": "Sum the numbers.",
            "question_id": "abc_1",
            "starter_code": "",
            "public_test_cases": '[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]',
            "private_test_cases": '[{"input": "5 6\\n", "output": "11\\n", "testtype": "stdin"}]',
            "metadata": "{}",
        },
        "print(sum(map(int, input().split())))",
    ),
    "taco": (
        {
            "question": "Return the sum.",
            "solutions": "[]",
            "starter_code": "def add(a, b):",
            "input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}',
            "difficulty": "EASY",
            "time_limit": "2.0 seconds",
        },
        "def add(a, b): return a + b",
    ),
    "eurus-2-code": (
        {
            "data_source": "codecontests",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sum the numbers."}],
            "ability": "code",
            "reward_model": {"ground_truth": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}', "style": "rule"},
            "extra_info": {"index": 0, "split": "dummy"},
        },
        "print(sum(map(int, input().split())))",
    ),
}


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


def read(tmp_path, name, *rows, needs_answer=False):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(source.read_rows(parse_dataset(f"{name}={path}", "data"), needs_answer=needs_answer))


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_passes_and_a_wrong_one_does_not(tmp_path, sandbox, name):
    record, program = ROWS[name]
    [row] = read(tmp_path, name, record)
    for text, reward in ((program, 1.0), ("print(0)", 0.0)):
        request = RewardRequest(response=f"```python\n{text}\n```", columns_json=row.columns_json, sandbox=sandbox)
        assert code_tests(request).value == reward


def test_prompts_show_what_a_program_must_look_like(tmp_path):
    prompts = {}
    for name, (record, _) in ROWS.items():
        [row] = read(tmp_path, name, record)
        prompts[name] = row.prompt
        assert not row.is_bare
    assert "def total(xs: List[int])" in prompts["humaneval"]
    assert "assert double(2) == 4" in prompts["mbpp"]
    assert "Read from standard input" in prompts["livecodebench-v6"]
    assert "```python\ndef add(a, b):\n```" in prompts["taco"]
    assert prompts["eurus-2-code"][1]["content"] == "Sum the numbers."
    assert all("in one code block" in prompts[name] for name in ("humaneval", "mbpp", "livecodebench-v6", "taco"))


def test_only_the_columns_of_grading_are_kept_and_ids_are_the_sets(tmp_path):
    [row] = read(tmp_path, "taco", ROWS["taco"][0])
    assert json.loads(row.columns_json).keys() == {"input_output", "starter_code", "difficulty", "time_limit"}
    assert [read(tmp_path, name, ROWS[name][0])[0].row_id for name in ("humaneval", "mbpp", "livecodebench-v6")] == [
        "humaneval-7",
        "mbpp-11",
        "livecodebench-v6-abc_1",
    ]


def test_rows_of_mathematics_are_passed_over(tmp_path):
    record = ROWS["eurus-2-code"][0]
    assert len(read(tmp_path, "eurus-2-code", record | {"ability": "math"}, record)) == 1


def test_a_reward_for_answers_is_told_which_one_to_take(tmp_path):
    with pytest.raises(DataError, match=r"taco has tests in the place of answers; grade it with --reward\.function"):
        read(tmp_path, "taco", ROWS["taco"][0], needs_answer=True)
    with pytest.raises(DataError, match="test_list is missing or empty"):
        read(tmp_path, "mbpp", ROWS["mbpp"][0] | {"test_list": []})


def test_files_of_a_repository_with_a_script_are_read_and_the_script_is_not(monkeypatch):
    import datasets

    called = []

    def load_dataset(*arguments, **options):
        called.append((arguments, options))
        return datasets.Dataset.from_list([{"a": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = ADAPTERS["livecodebench-v6"].hub
    assert [record for _, record in read_hub(hub, name="x")] == [{"a": 1}]
    [(arguments, options)] = called
    assert arguments == ("json",)
    assert options["data_files"] == [f"hf://datasets/{hub.repository}@{hub.revision}/test6.jsonl"]
