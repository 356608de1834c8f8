"""Ways of writing calls, by model family, and what a text of them says."""

import json
from collections.abc import Callable
from dataclasses import dataclass

MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": (
        "<tool_call>",
        "<function=note>",
        "<parameter=text>",
        "</parameter>",
        "</function>",
        "</tool_call>",
    ),
    "glm": ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
}

TYPES = {
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "listed": {"type": "array"},
    "object": {"type": "object"},
}


def tool(name, properties):
    function = {"name": name, "description": "Takes it.", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


TOOLS = [tool("note", {"text": {"type": "string"}}), tool("set", TYPES), tool("list_all", {})]


# ------------------------------------------------------------------------------------------------------ ways of writing
@dataclass(frozen=True, kw_only=True)
class Writing:
    """How the models of a family write calls.

    Attributes:
        form: as which they are read.
        one: text of a call from its name and its arguments; these may be a text that stands in their place.
        joint: what stands between two calls.
        around: what stands around all.
        opening: mark before a call, which models leave out.
        closing: mark behind it.
    """

    form: str
    one: Callable
    joint: str = ""
    around: tuple = ("", "")
    opening: str = ""
    closing: str = ""

    @property
    def is_json(self):
        return self.form not in ("glm", "qwen3_coder")

    def __call__(self, *calls):
        return self.joint.join(self.one(*call) for call in calls).join(self.around)


def as_json(given):
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def named(key):
    return lambda name, given: f'{{"name": {json.dumps(name)}, "{key}": {as_json(given)}}}'


def paired(head, pair, end):
    def one(name, given):
        listed = given.items() if isinstance(given, dict) else ([("text", given)] if given else [])
        unquoted = [(key, one if isinstance(one, str) else json.dumps(one)) for key, one in listed]
        return head.format(name) + "".join(pair.format(*each) for each in unquoted) + end

    return one


WRITINGS = {
    "hermes": Writing(
        form="hermes",
        one=lambda *call: f"<tool_call>\n{named('arguments')(*call)}\n</tool_call>",
        joint="\n",
        opening="<tool_call>\n",
        closing="\n</tool_call>",
    ),
    "qwen3_coder": Writing(
        form="qwen3_coder",
        one=paired("<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
        joint="\n",
        opening="<tool_call>\n",
        closing="\n</tool_call>",
    ),
    "glm": Writing(
        form="glm",
        one=paired("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
        joint="\n",
        opening="<tool_call>",
        closing="\n</tool_call>",
    ),
    "llama3": Writing(form="llama3", one=named("parameters"), joint="; "),
    "mistral list": Writing(
        form="mistral", one=named("arguments"), joint=", ", around=("[TOOL_CALLS][", "]"), opening="[TOOL_CALLS]"
    ),
    "mistral [ARGS]": Writing(
        form="mistral", one=lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}", opening="[TOOL_CALLS]"
    ),
    "deepseek R1": Writing(
        form="deepseek",
        one=lambda name, given: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(given)}\n```<｜tool▁call▁end｜>"
        ),
        joint="\n",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>",
    ),
    "deepseek V3.1": Writing(
        form="deepseek",
        one=lambda name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(given)}<｜tool▁call▁end｜>",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>",
    ),
    "gpt-oss": Writing(
        form="harmony",
        one=lambda name, given: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(given)}<|call|>"
        ),
        joint="<|start|>assistant",
        opening="<|channel|>",
        closing="<|call|>",
    ),
}


def says(text, *calls, **more):
    """A text whose calls are all whole."""
    return {"text": text, "calls": calls, **more}


def bad(text, *calls, **more):
    """A text with a call that cannot be read, beside those that can."""
    return {"text": text, "calls": calls, "malformed": True, "content": None, **more}


A, B = ("note", {"text": "Delft"}), ("set", {"whole": 3, "flag": True})
"""Calls of the tools, name and arguments."""
