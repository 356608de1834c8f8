import enum
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.conversations.tool_calls import FORMS, MAX_CALLS, find_form, parse_calls
from gtpo_megatron.conversations.tools import described
from tests.unit.conversations.call_texts import rows
from tests.unit.conversations.call_writings import MARKS, WRITINGS
from tests.unit.conversations.call_writings import TOOLS as KNOWN
from tests.unit.conversations.families import FAMILIES, TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "text": {"type": "string"}}},
        },
    }
]

DEEPSEEK_R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 7, "text": "8"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_V3_1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a":7,"text":"8"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n"
    "<arg_key>text</arg_key>\n<arg_value>8</arg_value>\n</tool_call>"
)
QWEN3_CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"
    "<parameter=text>\n8\n</parameter>\n</function>\n</tool_call>"
)

WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 7, "text": "8"}}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments":"{\\"a\\":7,\\"text\\":\\"8\\"}","name":"add"}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 7, "text": "8"}}'),
    ("qwen3_coder", QWEN3_CODER),
    ("glm", GLM),
    ("glm", GLM.replace("\n", "")),
    ("llama3", '{"name": "add", "parameters": {"a": 7, "text": "8"}}'),
    ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 7, "text": "8"}}'),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 7, "text": "8"}, "id": "abcdefgh1"}]'),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 7, "text": "8"}'),
    ("mistral", '[TOOL_CALLS]add{"a": 7, "text": "8"}'),
    ("deepseek", DEEPSEEK_R1),
    ("deepseek", DEEPSEEK_V3_1),
    ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7, "text": "8"}'),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 7, "text": "8"}<|call|>'),
]


@pytest.mark.parametrize(("form", "text"), WRITTEN)
def test_a_call_of_every_form_is_read(form, text):
    found = parse_calls(text, form, tools=TOOLS)
    assert found.malformed == ()
    assert found.content == ""
    (call,) = found.calls
    assert (call.name, call.arguments) == ("add", {"a": 7, "text": "8"})
    assert call.call_id == ("abcdefgh1" if "abcdefgh1" in text else "")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_is_that_of_the_template(name):
    assert find_form((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")) == FAMILIES[name].form


def test_text_around_calls_is_the_content_and_text_without_calls_is_left_alone():
    two = 'Let me see.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    found = parse_calls(two, "hermes")
    assert found.content == "Let me see."
    assert found.calls == (ToolCall(name="f", arguments={}), ToolCall(name="g", arguments={}))
    for form in FORMS:
        assert parse_calls("  7 + 8 = {15}\n", form).content == "  7 + 8 = {15}\n"


def test_an_argument_without_quotes_is_json_unless_its_schema_says_text():
    assert parse_calls(GLM, "glm").calls[0].arguments == {"a": 7, "text": 8}
    odd = QWEN3_CODER.replace("\n8\n", '\n1, "b": 2\n').replace("\n7\n", "\n1e999\n")
    assert parse_calls(odd, "qwen3_coder").calls[0].arguments == {"a": "1e999", "text": '1, "b": 2'}
    lines = QWEN3_CODER.replace("\n8\n", "\n\ntwo\nlines\n\n")
    assert parse_calls(lines, "qwen3_coder", tools=TOOLS).calls[0].arguments["text"] == "\ntwo\nlines\n"


class Size(enum.Enum):
    ONE, TWO = "1", "2"


def order(
    note: str | None = None,
    size: Size = Size.ONE,
    code: Literal["7", "8"] = "7",
    either: int | str = 0,
    several: list[str] | str = "",
    level: Literal[1, "low"] = 1,
    count: int = 0,
    anything: Any = None,
):
    """Orders something."""


@pytest.mark.parametrize("form", ["glm", "qwen3_coder"])
@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        ("note", "12345", "12345"),
        ("note", "true", "true"),
        ("note", '{"a": 1}', '{"a": 1}'),
        ("note", '"quoted"', '"quoted"'),
        ("note", "null", None),
        ("size", "2", Size.TWO),
        ("code", "8", "8"),
        ("either", "7", 7),
        ("either", "7.5", "7.5"),
        ("either", "null", "null"),
        ("several", '["a"]', ["a"]),
        ("several", "1", "1"),
        ("level", "1", 1),
        ("level", "low", "low"),
        ("count", "3", 3),
        ("anything", "[1]", [1]),
        ("anything", "free", "free"),
    ],
)
def test_an_argument_without_quotes_is_what_the_tool_takes(form, argument, text, value):
    tool = described(order, is_method=False)
    written = {
        "glm": f"<tool_call>order\n<arg_key>{argument}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=order>\n<parameter={argument}>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
    }
    (call,) = parse_calls(written[form], form, tools=[tool.schema]).calls
    assert tool.checked(call.arguments) == {argument: value}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["string", "null"]}, "7"),
        ({"type": ["integer", "string"]}, 7),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, "7"),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "7"),
        ({"anyOf": [{"type": "string"}, {}]}, 7),
        ({"enum": ["7", None]}, "7"),
        ({"const": "7"}, "7"),
        ({"$ref": "#/$defs/loop"}, 7),
        ({"$ref": "#/$defs/missing"}, 7),
        ({"$ref": ["x"], "type": [["string"], 3]}, 7),
        ({"type": 3, "enum": 4, "anyOf": 5}, 7),
        ("string", 7),
    ],
)
def test_schemas_of_every_shape_say_what_is_text(schema, value):
    definitions = {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    assert parse_calls(GLM, "glm", tools=tools).calls[0].arguments["a"] == value


def test_channels_of_harmony_are_told_apart():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    found = parse_calls(text, "harmony")
    assert (found.reasoning, found.content) == ("Hm.", "I add.")
    assert found.calls == (ToolCall(name="add", arguments={"a": 1}),)
    assert parse_calls("<|channel|>final<|message|>15", "harmony").content == "15"
    assert parse_calls("<|channel|>ana", "harmony", is_truncated=True).content == ""


def wrong(row):
    """What is read otherwise than a row says; empty for nothing."""
    found = parse_calls(row.text, row.form, is_truncated=row.is_truncated, tools=KNOWN)
    calls = tuple((call.name, dict(call.arguments)) for call in found.calls)
    content = found.content + found.reasoning
    is_right = calls == row.calls and bool(found.malformed) == row.malformed and row.content in (None, content)
    return "" if is_right else f"{row.writing}, {row.kind}: {found}"


def test_every_text_of_the_table_says_what_it_should():
    table = list(rows())
    assert len({(row.writing, row.kind) for row in table}) == len(table) > 600
    assert [fault for row in table if (fault := wrong(row))] == []


@pytest.mark.nightly
def test_the_documents_say_what_vllm_reads_in_the_table():
    command = [sys.executable, "-m", "tests.unit.conversations.vllm_verdicts"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    page = Path("docs/conversations_reference.md").read_text(encoding="utf-8")
    assert [one for one in printed.strip().split("\n\n") if one not in page] == []


@pytest.mark.parametrize("name", WRITINGS)
def test_random_values_come_back_or_are_refused(name):
    """Values with marks of calls in them; of those without quotes some have two readings, and are no call then."""
    rng, write = random.Random(name), WRITINGS[name]
    pieces = [
        *MARKS[write.form],
        *(" ", "\n", "a", "b c", "{", "}", '"', "'", "\\", "```", "</", "<", ">", "é", "😀", "[", "]"),
    ]
    num_refused = 0
    for _ in range(1000):
        texts = ["".join(rng.choices(pieces, k=rng.randint(0, 6))) for _ in range(2)]
        if write.is_json or not any(re.search(END_OF_VALUE, text) for text in texts):
            calls = [("note", {"text": text}) for text in texts]
            found = parse_calls(write(*calls), write.form, tools=KNOWN)
            is_whole = [(call.name, call.arguments) for call in found.calls] == calls and not found.malformed
            assert is_whole or (found.malformed and not write.is_json), texts
            num_refused += not is_whole
    assert num_refused < 250


END_OF_VALUE = r"</parameter>\s*<(?:/function|function|parameter)|</arg_value>\s*<arg_key>"
"""What nobody can tell from the end of a value."""


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_mutated_text_vanishes(form):
    rng, table = random.Random(form), [row for row in rows() if row.form == form and len(row.text) < 1000]
    marks = re.compile("|".join(map(re.escape, [*MARKS[form], "assistant"])))
    for _ in range(2000):
        text = rng.choice(table).text
        for _ in range(rng.randint(1, 3)):
            begin, end = sorted(rng.randint(0, len(text)) for _ in range(2))
            piece = rng.choice([*MARKS[form], *PIECES[-20:], text[begin:end]])
            text = rng.choice(
                [text[:begin] + text[end:], text[:begin] + piece + text[begin:], text[:begin], text[begin:]]
            )
        found = parse_calls(text, form, is_truncated=rng.random() < 0.5, tools=KNOWN)
        has_words = re.search(r"\w", marks.sub("", text))
        assert found.content.strip() or found.reasoning or found.calls or found.malformed or not has_words, text


MALFORMED = [
    ('{"name": "add", "arguments": {"a": 1', "not valid JSON"),
    ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "the key 'a' is there twice"),
    ('{"name": "add", "arguments": {"a": NaN}}', "not finite"),
    ('{"name": "add", "arguments": {"a": 1e999}}', "not finite"),
    ('{"name": "add", "arguments": {"a": "\\ud83d"}}', "surrogate"),
    ('{"name": "add", "arguments": {"a": ' + "9" * 400 + "}}", "an integer of 400 digits"),
    ('{"name": "add", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 64 deep"),
    ('{"name": "add", "arguments": ' + '{"a":' * 70 + "1" + "}" * 70 + "}", "nested more than 64 deep"),
    ('{"name": "add", "arguments": [1]}', r"the arguments are \[1\], expected a JSON object"),
    ('{"name": "add", "arguments": "[1]"}', "expected an object"),
    ('{"name": 7, "arguments": {}}', "the name of the tool is 7"),
    ('{"name": "", "arguments": {}}', "the name of the tool is ''"),
    ('{"name": "' + "a" * 1000 + '"}', "at most 256 characters"),
    ('{"function": "add"}', "lacks name"),
    ("[]", "expected a JSON object"),
    ("", "not valid JSON"),
    ("add(1, 2)", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "words"), MALFORMED)
def test_a_malformed_call_is_said_in_a_line(body, words):
    (line,) = parse_calls(f"<tool_call>{body}</tool_call>", "hermes").malformed
    assert re.search(words, line), line
    assert line.startswith("call 1: ")
    assert len(line) < 250
    assert "\n" not in line


def test_a_call_that_was_cut_says_so():
    for form, text in WRITTEN:
        cut = text[: text.rindex("8") + 1]
        found = parse_calls(cut, form, is_truncated=True)
        assert not found.calls, cut
        assert found.malformed == ("call 1: cut off by the length limit",), cut
        assert parse_calls(cut, form).malformed or form in ("glm", "qwen3_coder"), cut


def test_no_more_than_a_bound_of_calls_is_read():
    one = '<tool_call>{"name": "f"}</tool_call>'
    found = parse_calls(one * (MAX_CALLS + 500), "hermes")
    assert (len(found.calls), len(found.malformed), found.content) == (MAX_CALLS, 1, "")
    assert "only 64 calls" in found.malformed[0]
    listed = "[TOOL_CALLS]" + json.dumps([{"name": "f"}] * 500)
    assert len(parse_calls(listed, "mistral").calls) == MAX_CALLS


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[", "]"),
    *("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "to=", "analysis", "final", "```json", "```"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "{",
        "}",
        '"',
        ":",
        ",",
    ),
    *('{"name": "f", "arguments": {}}', '"name"', "parameters", "\n", " ", "é", "😀", "\ud83d", "\x00", "1e999", "NaN"),
]


@pytest.mark.parametrize("form", FORMS)
def test_no_text_is_an_error(form):
    rng = random.Random(form)
    for _ in range(1000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 40)))
        found = parse_calls(text, form, is_truncated=rng.random() < 0.5, tools=TOOLS)
        assert all("\n" not in line and len(line) < 300 for line in found.malformed)
        json.dumps([dict(call.arguments) for call in found.calls], allow_nan=False).encode()


@pytest.mark.parametrize("form", FORMS)
def test_a_quarter_of_a_megabyte_is_read_once(form):
    """Were the work quadratic, the test would run into the limit of time."""
    for piece in (*PIECES, '{"', '{"name"', '{"a": 1} ', '<tool_call>["', "<parameter=a>\n", '"parameters" {"name"'):
        parse_calls(piece * (250_000 // len(piece)), form)
