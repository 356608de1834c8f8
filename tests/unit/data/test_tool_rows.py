"""Rows whose messages call tools, and whose column ``tools`` has functions."""

import copy
import hashlib
import json

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data.chat_template import TemplateInputs, load_tokenizer, render_text
from gtpo_megatron.data.messages import ArrowRecord, tools_of
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.request import RewardRequest

FUNCTION = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Delft"}}}
MESSAGES = [
    {"role": "user", "content": "Is it dry?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "call00001"},
]
ROW = {"messages": MESSAGES, "tools": TOOLS, "answer": "yes"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("recipes/assets/tiny_tool_user")


def written(tmp_path, *rows):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return list(read_rows(parse_dataset(path, "data")))


def changed(**message):
    """The row with another message of the assistant."""
    row = copy.deepcopy(ROW)
    row["messages"][1] |= message
    return row


def test_the_policy_reads_tools_calls_and_results(tmp_path, tokenizer):
    """Role and content were all that came out, and nothing told it of a tool."""
    [problem] = load_problems(written(tmp_path, ROW), tokenizer, max_prompt_tokens=999).problems
    rendered = tokenizer.decode(problem.prompt_ids)
    assert rendered == render_text(tokenizer, MESSAGES, TemplateInputs(), tools=TOOLS)
    assert all(text in rendered for text in ("Tools: weather", '"city": "Delft"', "sunny", "Let me look."))
    assert problem.prompt == tuple(MESSAGES)
    request = RewardRequest(response="", prompt=problem.prompt)
    request.fresh().messages[1]["tool_calls"].clear()
    assert request.messages[1]["tool_calls"] == [CALL]
    assert request.prompt_text == "Is it dry?\n\nLet me look.\n\nsunny"


@pytest.mark.parametrize(
    "calls",
    [
        [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Delft"}'}}],
        [{**CALL, "function": {"name": "weather", "arguments": {"city": "Delft"}}, "index": None}],
        [{"id": "call00001", "name": "weather", "arguments": {"city": "Delft"}}],
        json.dumps([CALL]),
        str([CALL]),
    ],
)
def test_calls_in_the_forms_that_files_have(tmp_path, calls):
    [row] = read(written(tmp_path, changed(tool_calls=calls)))
    assert row.prompt == tuple(MESSAGES)


@pytest.mark.parametrize("content", [None, ""])
def test_a_message_of_calls_alone(tmp_path, content):
    """It was refused as malformed."""
    [row] = read(written(tmp_path, changed(content=content)))
    assert row.prompt[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("empty", [None, [], ""])
def test_keys_without_a_value_are_none(tmp_path, empty):
    """Parquet fills every message with the keys of the others."""
    messages = [one | {"tool_calls": empty, "name": None, "tool_call_id": None} for one in MESSAGES[:1]]
    [row] = read(written(tmp_path, {"messages": messages, "tools": empty, "answer": "yes"}))
    assert (row.prompt, row.tools) == (({"role": "user", "content": "Is it dry?"},), ())


@pytest.mark.parametrize("call", ["weather", {"name": 3}, {"function": {"name": "weather", "arguments": "Delft"}}, {}])
def test_a_call_that_cannot_be_read_is_named(tmp_path, call):
    with pytest.raises(DataError, match=r"set\.jsonl:1: messages has the call of a tool .*; expected {'function': {"):
        read(written(tmp_path, changed(tool_calls=[call])))


@pytest.mark.parametrize(
    "column",
    [
        TOOLS,
        [FUNCTION],
        json.dumps(TOOLS),
        json.dumps([FUNCTION]),
        [json.dumps(TOOLS[0])],
        [{"type": "function", "function": json.dumps(FUNCTION)}],
        [{"type": "function", "function": {**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}}],
    ],
)
@pytest.mark.parametrize("record", [dict, ArrowRecord])
def test_functions_in_the_forms_that_files_have(column, record):
    assert list(tools_of(record(tools=column))) == TOOLS


def test_a_function_with_a_null_has_it_where_nothing_is_filled_in():
    column = [{"type": "function", "function": {**FUNCTION, "strict": None}}]
    assert list(tools_of({"tools": column})) == column
    assert list(tools_of(ArrowRecord(tools=column))) == TOOLS
    assert list(tools_of(ArrowRecord(tools=json.dumps(column)))) == column


@pytest.mark.parametrize("column", ["hammer", ["hammer", "saw"], [{"name": "hammer"}], [*TOOLS, "saw"], {"a": 1}, 3])
def test_other_columns_of_tools_are_the_reward_s(column):
    assert tools_of({"tools": column}) == ()


def test_problems_differ_by_their_calls_and_their_tools(tmp_path, tokenizer):
    other = copy.deepcopy(TOOLS)
    other[0]["function"]["description"] = "Lies about it."
    rows = [ROW, ROW | {"tools": other}, changed(tool_calls=[{"function": {"name": "weather"}}]), ROW]
    found = load_problems(written(tmp_path, *rows), tokenizer, max_prompt_tokens=999)
    assert (len(found.problems), found.num_repeated) == (3, 1)
    assert set(found.questions) == {"Is it dry?"}


def test_an_environment_names_its_own_tools(tmp_path, tokenizer):
    path = written(tmp_path, {"prompt": "Is it dry?", "tools": TOOLS})
    needed = RowsNeeded(answer=False, whole_rows=True)
    [problem] = load_problems(path, tokenizer, max_prompt_tokens=999, graded_by=needed).problems
    assert "Tools: weather" not in tokenizer.decode(problem.prompt_ids)
    [problem] = load_problems(path, tokenizer, max_prompt_tokens=999, graded_by=RowsNeeded(answer=False)).problems
    assert "Tools: weather" in tokenizer.decode(problem.prompt_ids)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "Dry?", "tools": TOOLS, "answer": "yes"},
            r"place for the 1 functions of the column 'tools'; take a",
        ),
        ({"prompt": MESSAGES, "answer": "yes"}, "place for calls of tools; take a model"),
    ],
)
def test_a_template_without_a_place_for_them_is_refused(tmp_path, row, said):
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    with pytest.raises(DataError, match=rf"set\.jsonl:1: the chat template of .*tiny_qwen2 has no {said}"):
        load_problems(written(tmp_path, row), tokenizer, max_prompt_tokens=999)


def test_a_row_s_tools_come_before_those_of_the_options(tmp_path, tokenizer):
    given = TemplateInputs(options={"tools": [{"type": "function", "function": {"name": "other", "parameters": {}}}]})
    path = written(tmp_path, ROW)
    [problem] = load_problems(path, tokenizer, max_prompt_tokens=999, given=given).problems
    assert problem.prompt_ids == load_problems(path, tokenizer, max_prompt_tokens=999).problems[0].prompt_ids


def test_the_digest_of_plain_messages_is_what_it_was(tmp_path):
    [row] = read(written(tmp_path, {"messages": MESSAGES[:1], "answer": "yes"}))
    assert row.prompt_digest == hashlib.blake2b(b"user\0Is it dry?", digest_size=16).digest()
