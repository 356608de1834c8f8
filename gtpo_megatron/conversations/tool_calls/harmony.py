"""Harmony, the form of gpt-oss: messages on channels."""

import re
from functools import partial

from gtpo_megatron.conversations.tool_calls.json_calls import checked_call
from gtpo_megatron.conversations.tool_calls.parsed import Turn
from gtpo_megatron.conversations.tool_calls.scan import after_space
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import json_span

_MARK = re.compile(r"<\|(?:start|message)\|>")
_START, _MESSAGE, _CALL = "<|start|>", "<|message|>", "<|call|>"
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_WORDS = re.compile(
    r"^\s*(?:assistant\b)?\s*(?:commentary|analysis|final)?(?:\s*to=\S+)?(?:\s*<\|constrain\|>\s*\w*)?"
)
_IN_HEADER = re.compile(r"<\|(?:channel|constrain)\|>")


def read_harmony(text: str, turn: Turn) -> None:
    """``analysis`` is reasoning, a message with a recipient is a call, all others are the answer."""
    content: list[str] = []
    reasoning: list[str] = []
    place, is_started = 0, False
    while not turn.is_full and place < len(text):
        mark = _MARK.search(text, place)
        header, place = text[place : mark.start() if mark else None], mark.end() if mark else len(text)
        if not mark or mark[0] == _START:
            content.append(_words(header, turn, is_started=is_started))
            is_started = True
            continue
        content.append(_without_header(header))
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        body, end = _body(text, place, is_call=recipient is not None)
        if recipient:
            name = recipient[1].removeprefix("functions.")
            # The end of the last call is the turn's, which the caller has taken off.
            missing = _CALL if end == len(text) and turn.is_truncated and not text.endswith(_CALL) else ""
            turn.add(partial(checked_call, name, body), missing=missing)
        else:
            (reasoning if channel and channel[1] == "analysis" else content).append(body)
        place, is_started = end, False
    turn.keep("\n".join(one for one in content if one))
    turn.reasoning = "\n".join(one for one in reasoning if one)


def _body(text: str, place: int, *, is_call: bool) -> tuple[str, int]:
    """The body of the message that begins at a place, and where what follows it begins."""
    end = _END.search(text, place)
    value_end, is_whole = json_span(text, after_space(text, place)) if is_call else (place, False)
    if is_whole and (behind := _END.match(text, after_space(text, value_end))):
        end = behind  # marks within the JSON are text
    assert end is not None, "the text's end is one"
    return text[place : end.start()], end.end()


def _words(piece: str, turn: Turn, *, is_started: bool) -> str:
    """The words of a piece that is no message; it may be a header that was cut off.

    Args:
        piece: text up to a mark, or to the end.
        turn: the turn.
        is_started: a header should stand there.
    """
    if _IN_HEADER.search(piece) or (is_started and _RECIPIENT.search(piece)):
        turn.add(DataError("the header of a message ends without <|message|>"), missing=_MESSAGE)
    return _without_header(piece) if is_started else _END.sub("", piece.partition("<|channel|>")[0])


def _without_header(piece: str) -> str:
    """Words of a header that are none of its own."""
    return _HEADER_WORDS.sub("", _END.sub("", piece.partition("<|channel|>")[0])).strip()
