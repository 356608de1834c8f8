"""Rows keep their columns, in whatever shape and file they come."""

import json
from dataclasses import asdict, replace

import pytest

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("recipes/assets/tiny_qwen2")


def written(tmp_path, *rows, name="set.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return list(source.read_rows(parse_dataset(path, "data")))


@pytest.mark.parametrize(
    ("row", "prompt", "is_bare", "answer"),
    [
        ({"problem": "1+1?", "solution": "2"}, "1+1?", True, "2"),
        ({"question": "1+1?", "ground_truth": 2}, "1+1?", True, "2"),
        ({"messages": CHAT, "answer": "2"}, tuple(CHAT), False, "2"),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "solution": "no"}, tuple(CHAT), False, "2"),
        ({"prompt": "a", "problem": "b", "answer": 2}, "a", False, "2"),
    ],
)
def test_common_shapes_work_without_an_adapter(tmp_path, row, prompt, is_bare, answer):
    [found] = read(written(tmp_path, row))
    assert (found.prompt, found.is_bare, found.answer) == (prompt, is_bare, answer)


def test_other_shapes_show_the_columns_that_are_there(tmp_path):
    with pytest.raises(DataError, match=r"set\.jsonl:1: prompt is missing; .* problem, question or .*columns text, id"):
        read(written(tmp_path, {"text": "1+1?", "id": 1}))
    with pytest.raises(DataError, match=r"answer is missing; .*solution; the row has the columns prompt, label"):
        read(written(tmp_path, {"prompt": "1+1?", "label": 2}))[0].check_answer()
    with pytest.raises(DataError, match="messages ends with the assistant's turn"):
        read(written(tmp_path, {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "answer": 2}))


def test_all_columns_but_the_prompt_are_kept(tmp_path, tokenizer):
    tests = [{"input": "1\n", "output": "2\n"}]
    path = written(tmp_path, {"prompt": CHAT, "tests": tests, "weight": float("nan"), "id": "a"})
    [problem] = load_problems(path, tokenizer, max_prompt_tokens=64, graded_by=RowsNeeded(answer=False)).problems
    assert json.loads(problem.columns_json) == {"id": "a", "tests": tests, "weight": None}
    assert problem.prompt == tuple(CHAT)
    assert problem.answer == ""
    fields = asdict(problem)
    assert Problem(**fields | {"prompt": tuple(fields["prompt"])}) == problem


def test_csv_and_parquet_and_a_folder_hold_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text('problem,answer,tests\n"1+1, or\nmore?",2,"[1]"\nx,y,\n')
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"problem": "z", "answer": "3", "tests": None, "raw": b"\xff"}]),
        tmp_path / "b.parquet",
    )
    rows = read(str(tmp_path))
    assert [(row.prompt, row.answer) for row in rows] == [("1+1, or\nmore?", "2"), ("x", "y"), ("z", "3")]
    assert json.loads(rows[0].columns_json) == {"answer": "2", "tests": "[1]"}
    assert json.loads(rows[2].columns_json)["raw"] == "\\xff"


ROWS = [{"problem": "1+1?", "answer": "2"}, {"problem": "2+2?", "answer": "4"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps({"version": "1.0", "data": ROWS}, indent=1),
        json.dumps({"version": "1.0", "data": ROWS}),
        "\n".join(map(json.dumps, ROWS)),
    ],
)
def test_json_in_the_forms_that_people_write(tmp_path, text):
    (tmp_path / "set.json").write_text(text)
    assert [(row.prompt, row.answer) for row in read(str(tmp_path / "set.json"))] == [("1+1?", "2"), ("2+2?", "4")]


@pytest.mark.parametrize("text", ["", "3", "[]", '{"data": []}', '{"a": [], "b": []}', "[1]", "[", '{"a": 1'])
def test_json_that_holds_no_rows_is_one_line(tmp_path, text):
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(DataError, match=r"set\.json") as refused:
        read(str(tmp_path / "set.json"))
    assert len(str(refused.value).splitlines()) == 1


def test_columns_of_any_name(tmp_path):
    rows = [{"query": " 1+1? ", "extra_info": {"chat": CHAT, "gold": 2}, "answer": "no"}]
    ref = replace(parse_dataset(written(tmp_path, *rows), "x"), prompt_column="query", answer_column="extra_info.gold")
    [found] = source.read_rows(ref)
    assert (found.prompt, found.is_bare, found.answer) == ("1+1?", True, "2")
    [found] = source.read_rows(replace(ref, prompt_column="extra_info.chat"))
    assert (found.prompt, found.is_bare) == (tuple(CHAT), False)
    with pytest.raises(
        DataError, match=r"question is missing; .*; the row has the columns query, extra_info, answer; prompt_column"
    ):
        list(source.read_rows(replace(ref, prompt_column="question")))
    source.check_source(ref)
    with pytest.raises(
        DataError, match=r"in extra_info.label; the row has the columns query, .*; answer_column names another one"
    ):
        source.check_source(replace(ref, answer_column="extra_info.label"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1\n", r"a\.csv, row 1: 1 fields, expected 2"),
        ("a,a\n1,2\n", "names a column twice"),
        ('a\n"x', "not a readable CSV file"),
        ("", "holds no rows"),
    ],
)
def test_a_malformed_csv_file_is_one_line(tmp_path, text, complaint):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=complaint):
        read(str(tmp_path / "a.csv"))


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="a folder without files"):
        read(str(tmp_path))


def test_other_tests_are_another_content_and_common_columns_are_not(tmp_path, tokenizer):
    def content(**columns):
        path = written(tmp_path, {"prompt": "a", "answer": "1", **columns})
        found = load_problems(path, tokenizer, max_prompt_tokens=64)
        return found.content_sha256, found.used_sha256

    assert content() == content(source="set") == content(tests=None)
    assert len({content()[0], content(tests=[1])[0], content(tests=[2])[0]}) == 3
    assert len({content()[1], content(tests=[1])[1], content(tests=[2])[1]}) == 3


def test_rows_that_the_reward_cannot_grade_are_refused_or_dropped_and_counted(tmp_path, tokenizer, caplog):
    path = written(tmp_path, {"prompt": "a", "tests": [1]}, {"prompt": "b"}, {"prompt": "c"})

    def complaint(columns_json):
        return "" if "tests" in columns_json else "no tests"

    def load(**needed):
        graded_by = RowsNeeded(answer=False, complaint=complaint, **needed)
        return load_problems(path, tokenizer, max_prompt_tokens=64, graded_by=graded_by)

    with pytest.raises(DataError, match=r"set\.jsonl:2: no tests; mend the row"):
        load()
    found = load(drops=True)
    assert (len(found.problems), found.num_ungradable) == (1, 2)
    assert "2 rows cannot be graded and are left out; the first: " in caplog.text


def test_a_hub_name_has_a_commit():
    found = parse_dataset("hub:agentica-org/DeepCoder-Preview-Dataset/taco@abcdef1:test", "train_path")
    assert (found.repository, found.subset, found.revision, found.split) == (
        "agentica-org/DeepCoder-Preview-Dataset",
        "taco",
        "abcdef1",
        "test",
    )
    assert parse_dataset(str(found), "train_path") == found
    assert parse_dataset("hub:a/b@abcdef1", "x").split == ""
    for wrong in ("hub:a/b@main", "a/b@main", "hub:a@abcdef1"):
        with pytest.raises(ConfigError, match="expected OWNER/NAME or OWNER/NAME/CONFIGURATION, then maybe @COMMIT"):
            parse_dataset(wrong, "train_path")
