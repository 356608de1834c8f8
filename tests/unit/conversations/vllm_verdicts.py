"""What vLLM's parsers of tool calls read in the texts of ``call_texts.py``, beside what ours read.

::

    python -m tests.unit.conversations.vllm_verdicts

prints docs/conversations_reference.md's table. vLLM is asked for whole texts, as for an answer that is not streamed; it
has no reader of gpt-oss's calls as text.
"""

import copy
import functools
import json
import logging
from collections import Counter

from gtpo_megatron.conversations.tool_calls import parse_calls
from tests.unit.conversations.call_texts import rows
from tests.unit.conversations.call_writings import TOOLS
from tests.unit.conversations.families import tokenizer_of

PARSERS = {
    "hermes": ("hermes", "qwen2_5"),
    "qwen3_coder": ("qwen3_coder", "qwen3_coder"),
    "glm": ("glm45", "glm4_5"),
    "llama3": ("llama3_json", "llama3"),
    "mistral list": ("mistral", "mistral_nemo"),
    "mistral [ARGS]": ("mistral", "mistral_nemo"),
    "deepseek R1": ("deepseek_v3", "deepseek_r1"),
    "deepseek V3.1": ("deepseek_v31", "deepseek_r1"),
}
"""Of each way of writing, vLLM's name for its parser, and the family whose tokenizer it is given."""

VERDICTS = ("right", "told", "wrong", "text")
"""All calls and no other; a line about what cannot be read; other calls than written, silently; no call, silently."""


def ours(row):
    """Our verdict on a text."""
    found = parse_calls(row.text, row.form, is_truncated=row.is_truncated, tools=TOOLS)
    return verdict(row, [(call.name, dict(call.arguments)) for call in found.calls], is_told=bool(found.malformed))


class OfVllm:
    """vLLM's verdicts."""

    def __init__(self):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        messages = [{"role": "user", "content": "?"}]
        self._request = ChatCompletionRequest(model="policy", messages=messages, tools=TOOLS)
        self._find = ToolParserManager.get_tool_parser

    def __call__(self, row):
        parser = self._parser(row.writing)
        logging.disable(logging.ERROR)  # it logs what it cannot read, with its traceback
        try:
            found = parser.extract_tool_calls(row.text, self._request)
        finally:
            logging.disable(logging.NOTSET)
        calls = [(one.function.name, parsed(one.function.arguments)) for one in found.tool_calls]
        return verdict(row, calls, is_told=False)

    def _parser(self, writing):
        """A new one, since some keep what they have read."""
        name, _ = PARSERS[writing]
        kind, tokenizer = self._find(name), tokenizer_for(writing)
        try:
            return kind(tokenizer, self._request.tools, chat_template_kwargs={"enable_thinking": False})
        except TypeError:  # those that read no thinking
            return kind(tokenizer, self._request.tools)


@functools.cache
def tokenizer_for(writing):
    tokenizer = copy.deepcopy(tokenizer_of(PARSERS[writing][1]))
    if writing == "mistral [ARGS]":
        tokenizer.add_tokens(["[ARGS]"])
    return tokenizer


def parsed(arguments):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def verdict(row, calls, *, is_told):
    if is_told:
        return "told"
    if repr(calls) == repr(list(row.calls)) and not row.malformed:  # 1 is not True
        return "right"
    return "wrong" if calls else "text"


def counts(judges, *, malformed):
    """Per way of writing and judge, how many texts with calls that are whole, or are not, get each verdict."""
    found = {(name, judge): Counter() for name in PARSERS for judge in judges}
    for row in rows():
        if row.writing in PARSERS and row.malformed == malformed and (row.calls or malformed):
            for judge, judged in judges.items():
                found[row.writing, judge][judged(row)] += 1
    return found


def table(found):
    """The counts as Markdown."""
    lines = ["| written as | texts | ours: " + " / ".join(VERDICTS) + " | vLLM |", "|---|---|---|---|"]
    sums = {judge: Counter() for _, judge in found}
    for name in PARSERS:
        for judge in sums:
            sums[judge] += found[name, judge]
        cells = [" / ".join(str(found[name, judge][one]) for one in VERDICTS) for judge in sums]
        lines.append(f"| {name} | {found[name, 'ours'].total()} | {' | '.join(cells)} |")
    cells = [" / ".join(str(total[one]) for one in VERDICTS) for total in sums.values()]
    return "\n".join([*lines, f"| all | {sums['ours'].total()} | {' | '.join(cells)} |"])


def tables():
    """Of texts whose calls are whole, and of those with one that is not."""
    judges = {"ours": ours, "vllm": OfVllm()}
    return [table(counts(judges, malformed=malformed)) for malformed in (False, True)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
