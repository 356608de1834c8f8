"""Every known set of mathematics, by rows of its published schema; those of code are in ``test_code_adapters.py``."""

import json
import re

import pytest

from gtpo_megatron.config.problems import DAPO_TEMPLATE, fill_template, parse_dataset
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError
from tests.unit.data.test_code_adapters import ROWS as CODE_ROWS

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
        list(read_rows(write(tmp_path, name, RECORDS[name], record)))


@pytest.mark.parametrize("name", RECORDS)
def test_a_row_without_a_question_is_named_by_file_and_line(tmp_path, name):
    record = {k: v for k, v in RECORDS[name].items() if k not in ("problem", "question", "prompt")}
    with pytest.raises(DataError, match=r"file\.jsonl:1: (problem|question|prompt) is missing"):
        list(read_rows(write(tmp_path, name, record)))


def test_rows_prepared_for_training_are_pointed_elsewhere(tmp_path):
    with pytest.raises(DataError, match="read under a name of your own, such as mine=FILE"):
        list(read_rows(write(tmp_path, "aime24", dapo("x"))))


@pytest.mark.parametrize("final", [[], {}, 5, [""], [None]])
def test_an_olympiad_answer_is_a_list_of_text(tmp_path, final):
    with pytest.raises(DataError, match=r"file\.jsonl:1: (final_answer|answer) is"):
        list(read_rows(write(tmp_path, "olympiadbench", RECORDS["olympiadbench"] | {"final_answer": final})))


def test_a_mirror_may_call_the_question_otherwise(tmp_path):
    (row,) = read_rows(write(tmp_path, "aime25", {"question": QUESTION, "answer": 70}))
    assert (row.question, row.answer, row.row_id) == (QUESTION, "70", None)


def test_dapo_rows_without_an_index_have_no_id(tmp_path):
    for extra in (None, {}, {"index": None}):
        (row,) = read_rows(write(tmp_path, "dapo-math-17k", dapo("x") | {"extra_info": extra}))
        assert row.row_id is None


def test_every_known_set_has_rows_in_a_test():
    assert {*RECORDS, *CODE_ROWS, "livecodebench"} == {*ADAPTERS}


def test_revisions_are_whole_commits():
    for name, adapter in ADAPTERS.items():
        assert re.fullmatch(r"[0-9a-f]{40}", adapter.hub.revision), name
        assert adapter.name == name
