"""The shapes of rows to learn from."""

import dataclasses
import json

import pyarrow
import pyarrow.parquet
import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data.conversation_rows import read_conversations
from gtpo_megatron.errors import DataError


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def read(tmp_path, *rows, **columns):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    dataset = dataclasses.replace(parse_dataset(str(tmp_path / "rows.jsonl"), "data"), **columns)
    return list(read_conversations(dataset))


def turns_of(row):
    return [(one["role"], one["content"]) for one in row.messages]


TWO = [("user", "2+2?"), ("assistant", "4")]


@pytest.mark.parametrize(
    ("row", "is_bare", "is_text"),
    [
        ({"messages": said(*TWO)}, False, False),
        ({"messages": json.dumps(said(*TWO))}, False, False),
        ({"messages": said(*TWO, ("user", "thanks"))}, False, False),
        ({"prompt": "2+2?", "completion": "4"}, False, True),
        ({"prompt": said(TWO[0]), "completion": said(TWO[1])}, False, False),
        ({"prompt": said(TWO[0]), "completion": "4"}, False, False),
        ({"messages": said(TWO[0]), "response": "4"}, False, False),
        ({"question": "2+2?", "answer": "4"}, True, True),
        ({"problem": "2+2?", "solution": "4", "answer": "5"}, True, True),
        ({"prompt": "3+3?", "messages": said(*TWO), "answer": "5"}, False, False),
    ],
)
def test_every_shape_is_a_conversation(tmp_path, row, is_bare, is_text):
    (found,) = read(tmp_path, row)
    assert turns_of(found) == TWO
    assert (found.is_bare, found.is_text) == (is_bare, is_text)
    assert found.row_id == "rows-0"


def test_columns_of_other_names(tmp_path):
    row = {"q": {"text": "2+2?"}, "said": "4", "messages": said(("user", "?"), ("assistant", "!"))}
    (found,) = read(tmp_path, row, prompt_column="q.text", answer_column="said")
    assert turns_of(found) == TWO
    (found,) = read(tmp_path, {"talk": said(*TWO)}, prompt_column="talk")
    assert turns_of(found) == TWO


def test_rows_of_one_prompt_all_stay(tmp_path):
    found = read(tmp_path, {"prompt": "2+2?", "completion": "4"}, {"id": 7, "prompt": "2+2?", "completion": "four"})
    assert [row.row_id for row in found] == ["rows-0", "7"]


def test_calls_and_tools_come_with_their_row(tmp_path):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    result = {"role": "tool", "content": "4", "name": "add"}
    row = {"messages": [*said(TWO[0]), call, result, *said(TWO[1])], "tools": [{"name": "add", "parameters": {}}]}
    (found,) = read(tmp_path, row)
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert found.tools[0]["function"]["name"] == "add"


def test_parquet(tmp_path):
    table = pyarrow.Table.from_pylist([{"messages": said(*TWO)}, {"messages": said(*TWO, *TWO)}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = list(read_conversations(parse_dataset(str(tmp_path / "rows.parquet"), "data")))
    assert [turns_of(row) for row in found] == [TWO, TWO + TWO]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": said(TWO[0])}, "completion has no text and no list of messages; expected a conversation"),
        ({"text": "2+2=4"}, "the row has the columns text, and data.prompt_column names another one"),
        ({"prompt": "2+2?", "completion": ""}, "completion has no text"),
        ({"prompt": said(*TWO), "completion": "4"}, "prompt ends with the assistant's turn"),
        ({"prompt": "2+2?", "completion": said(TWO[0])}, "completion does not end with a turn of the assistant"),
        ({"messages": said(TWO[1])}, "begins with the assistant's turn"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, *said(TWO[1])]},
            "messages has a part of the type 'image'; models are given text alone; leave such rows out",
        ),
        (["2+2?", "4"], "got list, expected an object"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(tmp_path, row, words):
    with pytest.raises(DataError, match=words) as caught:
        read(tmp_path, {"prompt": "2+2?", "completion": "4"}, row)
    assert "rows.jsonl:2" in str(caught.value)


def test_no_rows(tmp_path):
    with pytest.raises(DataError, match="holds no rows; expected at least one conversation"):
        read(tmp_path)
