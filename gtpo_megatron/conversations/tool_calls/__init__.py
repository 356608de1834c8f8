"""Tool calls in the text of a policy, in the form that its chat template teaches.

Whatever the text, a reader returns: what is no call is content, and a call that cannot be read becomes a line that the
policy can be answered with. What a server of the family's would read is read; a text that has two readings is none.
The work is linear in the length of the text, ``MAX_CALLS`` calls are read of a turn, and arguments are JSON as
``untrusted/json_text.py`` takes it: no key twice, no depth beyond 64, no half of a surrogate pair, no infinite number.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gtpo_megatron.config.environment import FORMS, CallForm
from gtpo_megatron.conversations.tool_calls.bare import read_llama3, read_whole
from gtpo_megatron.conversations.tool_calls.deepseek import read_deepseek
from gtpo_megatron.conversations.tool_calls.harmony import read_harmony
from gtpo_megatron.conversations.tool_calls.hermes import read_hermes
from gtpo_megatron.conversations.tool_calls.json_calls import MAX_NAME
from gtpo_megatron.conversations.tool_calls.marked import GLM, QWEN3_CODER, read_marked
from gtpo_megatron.conversations.tool_calls.mistral import read_mistral
from gtpo_megatron.conversations.tool_calls.parsed import MAX_CALLS, ParsedText, Turn

__all__ = ["FORMS", "MAX_CALLS", "MAX_NAME", "ParsedText", "find_form", "parse_calls"]

_READERS: dict[CallForm, tuple[str, Callable[[str, Turn], None]]] = {
    "deepseek": ("<｜tool▁call▁begin｜>", read_deepseek),
    "harmony": ("<|channel|>", read_harmony),
    "glm": ("<arg_key>", partial(read_marked, marks=GLM)),
    "qwen3_coder": ("<function=", partial(read_marked, marks=QWEN3_CODER)),
    "hermes": ("<tool_call>", read_hermes),
    "mistral": ("[TOOL_CALLS]", read_mistral),
    "llama3": ("ipython", read_llama3),
}
"""Of each form the words by which a template is known, and what reads a turn."""

_MARKED = frozenset(FORMS) - {"harmony", "llama3"}
"""Forms whose calls have marks; a text that is calls and no more lacks them."""


def find_form(template: str) -> CallForm | None:
    """The form of calls that a chat template writes; None if it knows no tools."""
    return next((form for form in FORMS if _READERS[form][0] in template), None)


def parse_calls(
    text: str, form: CallForm, *, is_truncated: bool = False, tools: Sequence[Mapping[str, Any]] = ()
) -> ParsedText:
    """Takes a turn's text apart; never raises.

    Args:
        text: the turn, with special tokens as text.
        form: form of the calls.
        is_truncated: whether the length limit cut the turn.
        tools: as in ``Opening``; forms that write arguments without quotes (``glm``, ``qwen3_coder``) take from their
            schemas which arguments may be text. Where one says nothing, an argument is JSON if it can be read as such.
    """
    turn = Turn(is_truncated=is_truncated, tools=tools)
    if form not in _MARKED or not read_whole(text, turn):
        _READERS[form][1](text, turn)
    return turn.parsed()
