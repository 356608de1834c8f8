"""Texts of tool calls, way of writing by kind, with what each says: readers of calls are held against them."""

import json
import re
from dataclasses import dataclass

from tests.unit.conversations.call_writings import MARKS, WRITINGS, A, B, bad, says
from tests.unit.conversations.single_call_texts import SINGLE


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text and what it says.

    Attributes:
        writing: name of the way in which its calls are written.
        kind: what is special about it.
        text: as sampled, special tokens as text.
        calls: names and arguments.
        malformed: some of it is a call that cannot be read.
        content: what is no call; None: whatever is left of what cannot be read.
        is_truncated: the length limit ended it.
    """

    writing: str
    kind: str
    text: str
    calls: tuple = ()
    malformed: bool = False
    content: str | None = ""
    is_truncated: bool = False

    @property
    def form(self):
        return WRITINGS[self.writing].form


VALUES = {
    "a word": "Delft",
    "nothing": "",
    "a blank": " ",
    "blanks around": "  a  ",
    "lines": "one\ntwo\n\nthree",
    "line breaks around": "\na\n",
    "Windows' line breaks": "one\r\ntwo",
    "a tab": "a\tb",
    "accents": "naïve café",
    "other scripts": "東京 Ελλάδα",
    "an emoji": "😀 ok",
    "quotes": 'say "hi"',
    "apostrophes": "it's 'so'",
    "backslashes": "C:\\new\\table \\ \\\\",
    "a number": "7",
    "a zip code": "01234",
    "true": "true",
    "True": "True",
    "null": "null",
    "None": "None",
    "NaN": "NaN",
    "an infinite number": "1e999",
    "an object": '{"a": 1}',
    "half an object": '{"a": [1, ',
    "a list": "[1, 2]",
    "closing brackets": "}]})",
    "a call of JSON": '{"name": "set", "arguments": {"whole": 1}}',
    "a fence": "```json\n{}\n```",
    "half a fence": "a ``` b",
    "HTML": '<p class="a">b &amp; c</p>\n<br/>',
    "XML": '<?xml version="1.0"?><parameter name="a">1</parameter-list>',
    "less and more": "a < b > c <= d",
    "a formula": "\\frac{a}{b}^{2}",
    "Python": "def f(x: int) -> dict:\n    return {'a': [x, \"b\"]}  # done",
    "C": '#include <stdio.h>\nint main() { printf("%d\\n", a[0]); return 0; }',
    "a shell": "for f in *.py; do echo \"$f\" | sed -e 's/a/b/'; done; exit",
    "SQL": "SELECT * FROM t WHERE a = 'b;c';",
    "a URL": "https://a.example/b?c=d&e=%20#f",
    "a semicolon": '{"a": 1}; {"b": 2}',
    "a long text": "word " * 2000,
    "a diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n",
}

TYPED = {
    "integer": {"whole": 3},
    "negative": {"whole": -12},
    "a long integer": {"whole": 10**30},
    "a fraction": {"real": 0.125},
    "an exponent": {"real": 1e30},
    "true": {"flag": True},
    "false": {"flag": False},
    "null": {"maybe": None},
    "no null": {"maybe": 4},
    "a list": {"listed": [1, "two", None, [3.5]]},
    "an empty list": {"listed": []},
    "an object": {"object": {"a": {"b": ["c </d>", 1]}, "é": None}},
    "an empty object": {"object": {}},
    "all": {"whole": 1, "real": 2.5, "flag": True, "maybe": None, "listed": ["a"], "object": {"b": "c"}},
}

ANSWERS = {
    "a sentence": "It is dry in Delft.",
    "white space around": "  It is dry.\n",
    "braces": "f(x) = {x} for x in [1, 2]",
    "an object": '{"answer": 7}',
    "an object with a name": '{"name": "Ada", "age": 36}',
    "a name and parameters": '{"name": "GPT", "parameters": 175000000000, "layers": 96}',
    "a name, then words": '{"name": "Ada"} is what I have.',
    "a list": '[{"name": "Ada"}, {"name": "Bob"}]',
    "an empty list": "[]",
    "a broken object": '{"name": "Ada", age: 36}',
    "a fenced object": 'Here:\n```json\n{"city": "Delft", "names": ["a"]}\n```\nDone.',
    "XML": "<a><b>1</b></a> and 1 < 2 > 0",
    "Python": 'def f():\n    return {"name": f.__name__}',
    "a link": "[a](https://b.example) [ARGS] [1]",
}


def rows():
    """All texts."""
    for name, write in WRITINGS.items():
        for kind, row in [*in_arguments(write), *around_calls(name, write), *broken(name, write)]:
            yield Row(writing=name, kind=kind, **row)
        for kind, text in ANSWERS.items():
            yield Row(writing=name, kind=f"answer: {kind}", text=text, content=text)
    for name, kinds in SINGLE.items():
        for kind, row in kinds.items():
            yield Row(writing=name, kind=f"{name} alone: {kind}", **row)


def in_arguments(write):
    """What a call may be given."""
    for kind, value in VALUES.items():
        yield f"value: {kind}", says(write(call := ("note", {"text": value})), call)
    for kind, value in TYPED.items():
        yield f"typed: {kind}", says(write(call := ("set", value)), call)
    texts = {f"{mark} in {kind}": text.format(mark) for mark in MARKS[write.form] for kind, text in PLACES.items()}
    texts |= {"the end of a call": f"a{END.get(write.form, '}')}\nb", "two calls": f"Write {write(A, B)} to call."}
    texts |= {"all marks": " ".join(MARKS[write.form]), "a call": f"Write\n{write(A)}\nto call."}
    for kind, text in texts.items():
        row = write(call := ("note", {"text": text}))
        yield f"value: {kind}", (bad(row) if (write.form, kind) in AMBIGUOUS else says(row, call))


PLACES = {"a line": "say {} here", "lines": "say\n{}\nhere", "its place": "{}", "front": "{} it", "the end": "say {}"}

END = {"qwen3_coder": "\n</parameter>\n</function>\n</tool_call>", "glm": "</arg_value>\n</tool_call>"}

AMBIGUOUS = {
    *(("qwen3_coder", f"<parameter=text> in {place}") for place in ("lines", "its place", "front")),
    *((form, kind) for form in END for kind in ("the end of a call", "two calls")),
}
"""Marks in a value without quotes after which nobody can tell where the value ends."""


def around_calls(name, write):
    """What may stand around calls, and how many there may be."""
    call = write(A)
    yield "two calls", says(write(A, B), A, B)
    yield "the same call twice", says(write(A, A), A, A)
    yield "eight calls", says(write(*[A, B] * 4), *[A, B] * 4)
    yield "too many calls", bad(write(*[A] * 65), *[A] * 64)
    yield "no arguments", says(write(("list_all", {})), ("list_all", {}))
    yield "an unknown tool", says(write(("fly", {"text": "x"})), ("fly", {"text": "x"}))
    yield "an unknown argument", says(write(("note", {"to": "me"})), ("note", {"to": "me"}))
    yield "blank lines around", says(f"\n\n{call}\n\n", A)
    if write.form != "harmony":
        yield "words before", says(f"I look.\n\n{call}", A, content="I look.")
        yield "words behind", says(f"{call}\n\nThat is it.", A, content="That is it.")
        yield "words around", says(f"I look.\n{call}\nYes?", A, content="I look.\n\nYes?")
        yield "words between", says(f"{call}\nAnd:\n{write(B)}", A, B, content="And:")
        yield "an answer of JSON before", says(f'{{"answer": 7}}\n{call}', A, content='{"answer": 7}')
    if write.opening:
        text = call.replace(write.opening, "", 1)
        yield "no opening mark", (says if name in READ_UNOPENED else bad)(text, *[A] * (name in READ_UNOPENED))
        yield "the opening mark alone", bad(write.opening)
        yield "the opening mark alone, cut off", bad(write.opening.strip(), is_truncated=True)
        yield "the opening mark in a sentence", bad(f"Use {write.opening.strip()} to call a tool.")
    if write.closing:
        text = call.replace(write.closing, "")
        yield "no closing mark", says(text, A)
        yield "the closing mark twice", says(f"{write(A)}{write.closing}", A)
        is_whole = name == "qwen3_coder"  # its inner mark is there
        yield "no closing mark, cut off", (says if is_whole else bad)(text, *[A] * is_whole, is_truncated=True)
    if write.closing and write.form != "harmony":
        yield "the closing mark alone", bad(write.closing)
        yield "the closing mark in a sentence", bad(f"Close it with {write.closing.strip()} then.")


READ_UNOPENED = ("hermes", "qwen3_coder", "mistral list", "gpt-oss")
"""Where a call is read though its opening mark is missing."""


def broken(name, write):
    """Calls that cannot be read."""
    call = write(A)
    for kind, place in {"in a value": "Del", "in the name": "not", "before the arguments": "note"}.items():
        cut = call[: call.index(place) + len(place)]
        yield f"cut off {kind}", bad(cut, is_truncated=True)
        if write.form != "llama3":  # where half a name may begin an answer, too
            yield f"ended {kind}", bad(cut)
    yield "an empty name", bad(write(("", {"text": "x"})))
    yield "a long name", bad(write(("n" * 300, {"text": "x"})))
    if write.form != "harmony":
        yield "a name with blanks", bad(write(("my note", {"text": "x"})))
    wrong = write(("note", '{"text": ')) if write.is_json else re.sub("</(parameter|arg_value)>", "", call, count=1)
    yield "arguments that do not end", bad(wrong)
    if write.form != "llama3":  # where nothing shows where the next begins
        yield "a broken call, then one", bad(f"{wrong}{write.joint}{call}", A)
    yield "a call, then a broken one", bad(f"{call}{write.joint}{wrong}", A)
    twice = '{"text": "x", "text": "y"}'
    if not write.is_json:
        twice = {"text": "x", " text": "y"}
    yield "an argument twice", bad(write(("note", twice)))
    if not write.is_json:
        return
    for kind, given in WRONG_JSON.items():
        yield f"arguments: {kind}", bad(write(("note", given)))
    as_text = write(("note", json.dumps(json.dumps(A[1]))))
    is_read = name in ("hermes", "llama3", "mistral list")
    yield "arguments: JSON in a text", (says if is_read else bad)(as_text, *[A] * is_read)


WRONG_JSON = {
    "a list": '["Delft"]',
    "a number": "7",
    "a text": '"Delft"',
    "null": "null",
    "NaN": '{"text": NaN}',
    "an infinite number": '{"text": 1e999}',
    "half a surrogate pair": '{"text": "\\ud83d"}',
    "an integer of 400 digits": f'{{"text": {"9" * 400}}}',
    "nested too deep": f'{{"text": {"[" * 70}{"]" * 70}}}',
    "single quotes": "{'text': 'Delft'}",
    "a comma behind": '{"text": "Delft",}',
    "a comment": '{"text": "Delft" /* city */}',
    "a line break in a text": '{"text": "two\nlines"}',
    "a key without quotes": '{text: "Delft"}',
}
