"""SVAMP's rows; GSM8K and SVAMP by name, on copies of the published files where a folder ``shared/real`` has them."""

import json
import random
from pathlib import Path

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.source import pinned, read_rows
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.math_answer import math_answer

FOLDERS = [parent / "shared" / "real" for parent in Path(__file__).resolve().parents]


@pytest.mark.parametrize(
    ("name", "file", "num"),
    [("gsm8k", "gsm8k_train.jsonl", 7473), ("gsm8k-test", "gsm8k_test.jsonl", 1319), ("svamp", "SVAMP.json", 1000)],
)
def test_every_problem_is_read_and_its_answer_can_be_earned(name, file, num):
    path = next((folder / file for folder in FOLDERS if (folder / file).exists()), None)
    if path is None:
        pytest.skip(f"no copy of {file} in a folder shared/real beside the checkout")
    rows = list(read_rows(parse_dataset(f"{name}={path}", "data")))
    assert len({row.prompt for row in rows}) == len(rows) == num
    for row in random.Random(0).sample(rows, 50):
        answer = row.answer.rpartition("####")[2].strip()
        assert math_answer(f"so \\boxed{{{answer}}}", row.answer) == 1.0, row.place
        assert math_answer(f"so \\boxed{{{answer}7}}", row.answer) == 0.0, row.place


STORY = {"ID": "chal-0", "Body": "Ada has 7 pens. She gives 2 away", "Question": "How many pens has she now?"}


def svamp(tmp_path, *rows):
    path = tmp_path / "SVAMP.json"
    path.write_text(json.dumps(rows))
    return list(read_rows(parse_dataset(f"svamp={path}", "data")))


def test_a_story_and_its_question_are_one_problem(tmp_path):
    more = {"Answer": 5.0, "Equation": "( 7.0 - 2.0 )", "Type": "Subtraction"}
    first, other = svamp(tmp_path, STORY | more, {"Body": "It is 3.", "Question": "And 1 more?", "Answer": "4.5"})
    assert first.question == "Ada has 7 pens. She gives 2 away. How many pens has she now?"
    assert (first.answer, first.row_id, first.is_bare) == ("5", "svamp-chal-0", True)
    assert json.loads(first.columns_json)["Type"] == "Subtraction"
    assert (other.question, other.answer, other.row_id) == ("It is 3. And 1 more?", "4.5", None)


@pytest.mark.parametrize("lacking", ["Body", "Question", "Answer"])
def test_a_row_that_lacks_something_is_named(tmp_path, lacking):
    row = STORY | {"Answer": 5.0}
    del row[lacking]
    with pytest.raises(DataError, match=rf"row 1: {lacking.lower()}|row 1: {lacking}"):
        svamp(tmp_path, row)[0].check_answer()


def test_of_the_hub_s_copy_the_newest_commit_is_pinned(monkeypatch):
    monkeypatch.setattr(source, "newest_commit", lambda repository: {"ChilleD/SVAMP": "ab" * 20}[repository])
    assert pinned("svamp", "data") == "svamp@" + "ab" * 20
    assert pinned("svamp@abcdef1", "data") == "svamp@abcdef1"
    assert pinned("gsm8k", "data") == "gsm8k"
    assert pinned("svamp=x.json", "data") == "svamp=x.json"
