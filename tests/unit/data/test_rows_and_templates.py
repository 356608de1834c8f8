"""Rows against ``apply_chat_template``: over all templates of the tests, tokens are equal or the row is refused."""

import datetime
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.conversations.chat_form import chat_request_from
from gtpo_megatron.conversations.openai_form import message_from
from gtpo_megatron.data.chat_template import CLOCK, TemplateInputs, load_tokenizer, render_prompt
from gtpo_megatron.data.messages import REASONING_KEYS
from gtpo_megatron.data.prompts import load_problems
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError
from tests.unit.conversations.families import FAMILIES, TEMPLATES, tokenizer_of

ASSETS = sorted(path.parent.name for path in Path("recipes/assets").glob("*/chat_template.jinja"))
DAY = "2026-01-31"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "integer"}}},
        },
    }
]


def turn(content, **more):
    return {"role": "assistant", "content": content, **more}


def user(content="And now?"):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return [{"id": "call00001", "type": "function", "function": function, **more}]


def result(content="sunny"):
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": content}


CALL = call({"city": "Delft"})

SHAPES = {
    "plain": [system("Be short."), user("Is it dry?")],
    "earlier turn": [user(), turn("Yes."), user()],
    "reasoning_content": [user(), turn("Yes.", reasoning_content="It is dry."), user()],
    "reasoning_content of a call": [user(), turn("", reasoning_content="I look.", tool_calls=CALL), result()],
    "thinking": [user(), turn("Yes.", thinking="It is dry."), user()],
    "thinking of a call": [user(), turn("", thinking="I look.", tool_calls=CALL), result()],
    "reasoning": [user(), turn("Yes.", reasoning="It is dry."), user()],
    "people with names": [{**user(), "name": "ann"}, {**turn("Hi."), "name": "bob"}, {**user(), "name": "eve"}],
    "both names": [user(), turn("", reasoning_content="A.", thinking="A.", tool_calls=CALL), result()],
    "empty reasoning": [user(), turn("<think>a</think>b", reasoning_content="", tool_calls=CALL), result()],
    "reasoning that is null": [user(), turn("Yes.", reasoning_content=None, thinking=None, tool_calls=CALL), result()],
    "thinking in the content": [user(), turn("<think>\nI look.\n</think>\n\nLook.", tool_calls=CALL), result()],
    "content in white space": [user(" a\n"), turn("\n\nb "), user("c\n")],
    "call": [user(), turn("Let me look.", tool_calls=CALL), result()],
    "parts of text": [
        system(parts("Be short.", "Be kind.")),
        user(parts("Is it", " dry?")),
        turn(parts("Yes.")),
        user(),
    ],
    "parts of a result": [user(), turn("", tool_calls=CALL), result(parts("sunny", "and warm"))],
    "developer": [{"role": "developer", "content": "Be short."}, user("Is it dry?")],
    "empty system": [system(""), user()],
    "empty turn": [user(), turn(""), user()],
    "empty call": [user(), turn("", tool_calls=CALL), result()],
    "call beside null": [user(), turn(None, tool_calls=CALL), result()],
    "null result": [user(), turn("", tool_calls=CALL), result(None)],
    "empty result": [user(), turn("", tool_calls=CALL), result("")],
    "empty user": [user(), turn("Yes."), user("")],
    "null argument": [user(), turn("", tool_calls=call({"city": "Delft", "day": None})), result()],
    "nested nulls": [user(), turn("", tool_calls=call({"a": {"b": None, "c": [None, {"d": None}]}})), result()],
    "no arguments": [user(), turn("", tool_calls=call({})), result()],
    "arguments that are null": [user(), turn("", tool_calls=call(None)), result()],
    "two calls": [user(), turn("", tool_calls=CALL + call({"city": "Bonn"})), result(), result("wet")],
    "arguments first": [
        user(),
        turn("", tool_calls=[{"function": {"arguments": {"city": "Delft"}, "name": "weather"}, "id": "call00001"}]),
        result(),
    ],
}

REFUSED = {"empty user": "messages has an empty content of the user", "arguments that are null": "the call of a tool"}
"""Shapes that every template's rows are refused for, and the words that name it."""


def tokenizer_for(name):
    return tokenizer_of(name) if name in FAMILIES else load_tokenizer(f"recipes/assets/{name}")


def written(tmp_path, **row):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(row | {"answer": "yes"}) + "\n")
    return str(path)


def rendered(path, tokenizer):
    given = TemplateInputs(date=DAY)
    [problem] = load_problems(path, tokenizer, max_prompt_tokens=9999, given=given).problems
    return list(problem.prompt_ids)


def expected(tokenizer, messages, tools):
    """What ``transformers`` makes of the row; None where the template refuses it.

    A content that is null is an empty one, for which some templates write None; parts are lines, as vLLM joins them.
    """
    messages = [one | {"content": text_of(one["content"])} for one in messages]
    clock = {CLOCK: datetime.datetime.fromisoformat(DAY).strftime}
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **clock)
    except Exception:  # noqa: BLE001 - whatever a template raises
        return None
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(content):
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def test_all_templates_of_the_tests_are_here():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
    assert len(ASSETS) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *ASSETS])
def test_a_row_is_what_transformers_renders_or_is_refused_by_name(name, tmp_path):
    cases = [(shape, tools) for shape in SHAPES for tools in (None, TOOLS)]
    found = {(shape, bool(tools)): fault(name, shape, tools, tmp_path) for shape, tools in cases}
    assert {case: words for case, words in found.items() if words} == {}


def fault(name, shape, tools, tmp_path):
    """What is wrong with how a row is taken; empty for nothing."""
    messages, tokenizer = SHAPES[shape], tokenizer_for(name)
    path = written(tmp_path, messages=messages, **({"tools": tools} if tools else {}))
    wanted = expected(tokenizer, messages, tools)
    words = refusal(name, shape, tools, wanted)
    try:
        ids = rendered(path, tokenizer)
    except DataError as error:
        is_named = words is not None and re.search(rf"set.jsonl:1: .*{words}", str(error)) and "\n" not in str(error)
        return "" if is_named else f"refused: {error}"
    return "" if words is None and ids == wanted else f"rendered as {tokenizer.decode(ids)!r}"


def refusal(name, shape, tools, wanted):
    """The words for which a row is refused; None if it is rendered."""
    template, messages = tokenizer_for(name).chat_template, SHAPES[shape]
    if shape in REFUSED:
        return REFUSED[shape]
    if tools and "tools" not in template:
        return "has no place for the 1 functions"
    if any("tool_calls" in one for one in messages) and "tool_calls" not in template:
        return "has no place for calls of tools"
    read = {key for key in REASONING_KEYS if re.search(rf"\.{key}\b", template)}
    has = {key for one in messages for key in REASONING_KEYS if one.get(key)}
    if read and has and not read & has:
        return "call it as the template does"
    return "refuses the messages" if wanted is None else None


def test_thinking_under_a_name_that_the_template_does_not_read_is_refused_and_not_lost(tmp_path):
    path = written(tmp_path, messages=SHAPES["thinking of a call"])
    with pytest.raises(
        DataError, match=r"set.jsonl:1: .* reads reasoning_content, and .* has thinking: call it as the"
    ):
        rendered(path, tokenizer_of("qwen3"))
    assert "I look." in tokenizer_of("gpt_oss").decode(rendered(path, tokenizer_of("gpt_oss")))


@pytest.mark.parametrize("thought", [["I look."], {"text": "I look."}, 3])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_that_is_no_text_is_named(key, thought, tmp_path):
    path = written(tmp_path, messages=[user(), turn("Yes.", **{key: thought}), user()])
    with pytest.raises(
        DataError, match=rf"set.jsonl:1: messages has {key}=.* in a turn of the assistant; expected a text"
    ):
        list(read_rows(parse_dataset(path, "data")))


def parquet(tmp_path, *rows):
    path = tmp_path / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | {"answer": "yes"} for row in rows]), path)
    return str(path)


def test_arrow_fills_objects_with_nulls_which_are_not_there(tmp_path):
    """The other row's argument, thinking and tool call, and the keys of other roles."""
    other = [user("Is it wet?"), turn("", thinking="I look.", tool_calls=call({"day": 3})), result()]
    mine = SHAPES["call"]
    path = parquet(tmp_path, {"messages": other, "tools": None}, {"messages": mine, "tools": TOOLS})
    _, row = read_rows(parse_dataset(path, "data"))
    assert row.prompt == tuple(mine)
    assert list(row.tools) == TOOLS
    tokenizer = tokenizer_of("qwen3")
    found = render_prompt(tokenizer, row.prompt, given=TemplateInputs(date=DAY), tools=row.tools)
    assert list(found) == expected(tokenizer, mine, TOOLS)


@pytest.mark.parametrize("as_text", ["arguments", "tool_calls", "messages"])
def test_what_arrow_has_as_json_in_a_text_keeps_its_nulls(as_text, tmp_path):
    messages = SHAPES["null argument"]
    calls = (
        call(json.dumps({"city": "Delft", "day": None}))
        if as_text == "arguments"
        else call({"city": "Delft", "day": None})
    )
    mine = [user(), turn("", tool_calls=json.dumps(calls) if as_text == "tool_calls" else calls), result()]
    path = parquet(tmp_path, {"messages": json.dumps(mine) if as_text == "messages" else mine})
    [row] = read_rows(parse_dataset(path, "data"))
    assert row.prompt == tuple(messages)


def test_a_call_without_arguments_is_one_of_arrow_too(tmp_path):
    path = parquet(tmp_path, {"messages": SHAPES["call"]}, {"messages": SHAPES["arguments that are null"]})
    _, row = read_rows(parse_dataset(path, "data"))
    assert row.prompt == tuple(SHAPES["no arguments"])


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in REFUSED])
def test_an_environment_may_open_with_the_messages_of_its_row(shape, tmp_path):
    [row] = read_rows(parse_dataset(written(tmp_path, messages=SHAPES[shape]), "data"))
    for message in row.prompt:
        opened = message_from(message, "reset")
        role = "system" if message["role"] == "developer" else message["role"]
        assert (opened.role, opened.content) == (role, message["content"])
        calls = [{"name": one.name, "arguments": one.arguments} for one in opened.tool_calls]
        wanted = [one["function"] for one in message.get("tool_calls", [])]
        assert calls == [{"name": one["name"], "arguments": one["arguments"]} for one in wanted]
        assert [one.call_id for one in opened.tool_calls] == [
            one.get("id", "") for one in message.get("tool_calls", [])
        ]
        assert opened.reasoning == next((message[key] for key in REASONING_KEYS if message.get(key)), "")


def test_parts_are_joined_alike_in_rows_and_by_environments_and_agents(tmp_path):
    given = {"role": "user", "content": parts("Is it", "dry?")}
    [row] = read_rows(parse_dataset(written(tmp_path, messages=[given]), "data"))
    request = chat_request_from({"messages": [given]})
    found = {row.prompt[0]["content"], message_from(given, "reset").content, request.asked.opening.messages[0].content}
    assert found == {"Is it\ndry?"}


@pytest.fixture(scope="module")
def beginning():
    """A tokenizer that begins every text with a token, as Llama's does."""
    tokenizer = load_tokenizer("recipes/assets/tiny_qwen2")
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("text", "num_begins"), [("H i", 1), ("<|begin|>H i", 1), ("<|begin|><|begin|>H i", 2), ("H <|begin|>i", 2)]
)
def test_a_verbatim_prompt_begins_once(beginning, text, num_begins):
    """It was two tokens where the text has one already, as a rendered prompt in a file has."""
    ids = render_prompt(beginning, text, verbatim_text=True)
    assert ids.count(beginning.bos_token_id) == num_begins
    without = [one for one in ids if one != beginning.bos_token_id]
    assert without == [one for one in beginning.encode(text, add_special_tokens=False) if one != beginning.bos_token_id]


def test_a_tokenizer_that_adds_no_beginning_leaves_the_text_as_it_is():
    tokenizer = tokenizer_of("llama3")
    twice = tokenizer.bos_token * 2 + "H"
    assert list(render_prompt(tokenizer, twice, verbatim_text=True)) == tokenizer.encode(
        twice, add_special_tokens=False
    )
