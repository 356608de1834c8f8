"""What is read of a turn: its calls, those that cannot be read, and the text around them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.conversations.messages import ToolCall
from gtpo_megatron.conversations.tool_calls.schemas import tool_kinds
from gtpo_megatron.errors import DataError

MAX_CALLS = 64
"""Calls that are read of a turn; what follows is one malformed call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedText:
    """A turn's text, taken apart.

    Attributes:
        content: the text without calls and reasoning.
        reasoning: text of harmony's channel for thinking.
        calls: calls, in the text's order.
        malformed: complaint about each call that cannot be read.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


class Turn:
    """A turn while it is read.

    Args:
        is_truncated: whether the length limit cut the turn.
        tools: tools of the conversation, as in ``Opening``.

    Attributes:
        calls: calls read so far.
        malformed: complaints about those that cannot be read.
        kept: text around calls, piece by piece.
        reasoning: text of harmony's channel for thinking.
        is_full: whether reading has ended, with ``MAX_CALLS`` calls.
        kinds: kinds of values that the schema of each tool's arguments allows.
        names: names of the tools.
    """

    def __init__(self, *, is_truncated: bool, tools: Sequence[Mapping[str, Any]]) -> None:
        self.is_truncated, self.kinds = is_truncated, tool_kinds(tools)
        self.names = frozenset(self.kinds)
        self.calls: list[ToolCall] = []
        self.malformed: list[str] = []
        self.kept: list[str] = []
        self.reasoning = ""
        self.is_full = False

    def add(self, read: Callable[[], ToolCall] | ToolCall | DataError, *, missing: str = "") -> None:
        """Adds a call.

        Args:
            read: the call, or the complaint; or a function that returns the one or raises the other.
            missing: the mark that should end the call, if it is not there.
        """
        number = len(self.calls) + len(self.malformed) + 1
        if number > MAX_CALLS:
            if not self.is_full:
                self.malformed.append(f"call {number} and what follows: only {MAX_CALLS} calls of a turn are read")
            self.is_full = True
            return
        if missing and self.is_truncated:
            self.malformed.append(f"call {number}: cut off by the length limit")
            return
        try:
            if isinstance(read, DataError):
                raise read
            self.calls.append(read if isinstance(read, ToolCall) else read())
        except DataError as problem:
            end = f", and {missing} is missing" if missing else ""
            self.malformed.append(f"call {number}: {problem}{end}")

    def keep(self, text: str, strays: re.Pattern[str] | None = None) -> None:
        """Adds text that belongs to no call, while calls are read.

        Args:
            text: text between calls, before or behind them.
            strays: marks of calls, which have no place there: what they were to be is a malformed call.
        """
        if self.is_full:
            return
        if strays and (stray := strays.search(text)):
            text = strays.sub("", text)
            if text.strip() or not self.calls:  # not a mark that a model has written twice
                self.add(DataError(f"{stray[0].strip()} stands outside of a call"))
        self.kept.append(text)

    def parsed(self) -> ParsedText:
        """The turn, once all of it is read."""
        content = "".join(self.kept)
        if self.calls or self.malformed:
            content = content.strip()
        return ParsedText(
            content=content, reasoning=self.reasoning, calls=tuple(self.calls), malformed=tuple(self.malformed)
        )
