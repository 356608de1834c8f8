"""Every known set of mathematics, by rows of its published schema; those of code are in ``test_code_adapters.py``."""

import json
import re

import pytest

from gtpo_megatron.config.problems import DAPO_TEMPLATE, fill_template, parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.hub import read_hub
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.code_tests import code_tests
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.sandbox.choose import UnsafeSandbox

QUESTION = "Find the largest $m$ such that $m^2 < 10$."


def dapo(index, answer="3", question=QUESTION):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": fill_template(DAPO_TEMPLATE, question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


RECORDS = {
    "aime24": {"id": 60, "problem": QUESTION, "solution": "...", "answer": "033", "url": "https://", "year": "2024"},
    "aime25": {"problem": QUESTION, "answer": "70", "id": "0"},
    "math500": {
        "problem": QUESTION,
        "solution": "...",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    "gsm8k": {"question": QUESTION, "answer": "It is <<9/3=3>>3.\n#### 3"},
    "gsm8k-test": {"question": QUESTION, "answer": "It is <<9/3=3>>3.\n#### 3"},
    "amc23": {"id": 0, "answer": 27.0, "url": "https://", "question": QUESTION},
    "minerva": {"question": QUESTION, "answer": "4.5e33"},
    "olympiadbench": {
        "id": 1606,
        "question": QUESTION,
        "solution": ["..."],
        "final_answer": ["$\\frac{1}{2}$", "3."],
        "context": None,
        "image_1": None,
        "modality": "Text-only",
        "difficulty": "Competition",
        "is_multiple_answer": True,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
        "question_type": "Open-ended",
        "subfield": "Algebra",
        "subject": "Math",
        "language": "English",
    },
    "dapo-math-17k": dapo("9a9b6eb4-a1cb"),
}
EXPECTED = {
    "gsm8k": ("It is <<9/3=3>>3.\n#### 3", None),
    "gsm8k-test": ("It is <<9/3=3>>3.\n#### 3", None),
    "aime24": ("033", "aime24-60"),
    "aime25": ("70", "aime25-0"),
    "math500": ("\\left( 3, \\frac{\\pi}{2} \\right)", "math500-test/precalculus/807.json"),
    "amc23": ("27.0", "amc23-0"),
    "minerva": ("4.5e33", None),
    "olympiadbench": ("\\frac{1}{2}, 3", "olympiadbench-1606"),
    "dapo-math-17k": ("3", "9a9b6eb4-a1cb"),
}


def write(tmp_path, name, *records, ending="jsonl"):
    path = tmp_path / f"file.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return parse_dataset(f"{name}={path}", "data")


def check_answers(dataset):
    """As a reward that needs reference answers does."""
    for row in read_rows(dataset):
        row.check_answer()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", RECORDS)
def test_a_row_of_the_published_schema(tmp_path, name, ending):
    (row,) = read_rows(write(tmp_path, name, RECORDS[name], ending=ending))
    assert (row.answer, row.row_id) == EXPECTED[name]
    assert row.question == QUESTION
    assert row.is_bare == (name != "dapo-math-17k")
    assert row.source == ("math_dapo" if name == "dapo-math-17k" else name)


@pytest.mark.parametrize("name", RECORDS)
def test_a_row_without_an_answer_is_named_by_file_and_line(tmp_path, name):
    record = {k: v for k, v in RECORDS[name].items() if k not in ("answer", "final_answer", "reward_model")}
    with pytest.raises(DataError, match=r"file\.jsonl:2: (answer|final_answer) is missing"):
        check_answers(write(tmp_path, name, RECORDS[name], record))


@pytest.mark.parametrize("name", RECORDS)
def test_a_row_without_a_question_is_named_by_file_and_line(tmp_path, name):
    record = {k: v for k, v in RECORDS[name].items() if k not in ("problem", "question", "prompt")}
    with pytest.raises(DataError, match=r"file\.jsonl:1: (problem|question|prompt) is missing"):
        check_answers(write(tmp_path, name, record))


def test_rows_prepared_for_training_are_pointed_elsewhere(tmp_path):
    with pytest.raises(DataError, match="read under a name of your own, such as mine=FILE"):
        check_answers(write(tmp_path, "aime24", dapo("x")))


@pytest.mark.parametrize("final", [[], {}, 5, [""], [None]])
def test_an_olympiad_answer_is_a_list_of_text(tmp_path, final):
    with pytest.raises(DataError, match=r"file\.jsonl:1: (final_answer|answer) is"):
        check_answers(write(tmp_path, "olympiadbench", RECORDS["olympiadbench"] | {"final_answer": final}))


def test_a_mirror_may_call_the_question_otherwise(tmp_path):
    (row,) = read_rows(write(tmp_path, "aime25", {"question": QUESTION, "answer": 70}))
    assert (row.question, row.answer, row.row_id) == (QUESTION, "70", None)


def test_dapo_rows_without_an_index_have_no_id(tmp_path):
    for extra in (None, {}, {"index": None}):
        (row,) = read_rows(write(tmp_path, "dapo-math-17k", dapo("x") | {"extra_info": extra}))
        assert row.row_id is None


def test_every_known_set_has_rows_in_a_test():
    assert {*RECORDS, *ROWS, "livecodebench", "svamp"} == {*ADAPTERS}


def test_revisions_are_whole_commits():
    for name, adapter in ADAPTERS.items():
        # of SVAMP the newest commit is taken when a run starts, and written into its configuration
        assert re.fullmatch(r"[0-9a-f]{40}", adapter.hub.revision) or name == "svamp"
        assert adapter.name == name


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


def read(tmp_path, name, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(source.read_rows(parse_dataset(f"{name}={path}", "data")))


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


def test_rows_of_livecodebench_say_that_its_own_comparison_decides(tmp_path, sandbox):
    record, _ = ROWS["livecodebench-v6"]
    [row] = read(tmp_path, "livecodebench-v6", record)
    assert {name: json.loads(row.columns_json)[name] for name in ("comparison", "time_limit")} == {
        "comparison": "livecodebench",
        "time_limit": 6,
    }
    program = "```python\nprint(sum(map(float, input().split())))\n```"  # 3.0 for 3
    request = RewardRequest(response=program, columns_json=row.columns_json, sandbox=sandbox)
    assert code_tests(request).value == 1.0


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
    others = [record | {"ability": "math"}] * 3
    assert len(read(tmp_path, "eurus-2-code", others[0], record)) == 1
    with pytest.raises(DataError, match=r"holds no rows of eurus-2-code among its 3; expected at least one problem"):
        read(tmp_path, "eurus-2-code", *others)


def test_rows_that_are_passed_over_are_counted(tmp_path):
    """``PRIME-RL/Eurus-2-RL-Data`` is this set too, whose rows of mathematics nobody was told of."""
    record = ROWS["eurus-2-code"][0]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (record | {"ability": "math"}, record)))
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    needed = RowsNeeded(answer=False)
    found = load_problems(f"eurus-2-code={path}", tokenizer, max_prompt_tokens=99, graded_by=needed)
    said = f"{path}: 1 of 2 rows are not of eurus-2-code, the data set that is known there, and are left out"
    assert (len(found.problems), found.num_rows, found.notes) == (1, 1, (said,))


def test_a_reward_for_answers_is_told_which_one_to_take(tmp_path):
    with pytest.raises(DataError, match=r"taco has tests in the place of answers; grade it with --reward\.function"):
        read(tmp_path, "taco", ROWS["taco"][0])[0].check_answer()
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
