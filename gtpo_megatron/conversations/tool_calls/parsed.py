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
        content: without calls and reasoning.
        reasoning: of harmony's channel for it.
        calls: in the text's order.
        malformed: per call that cannot be read, what is wrong with it.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


class Turn:
    """A turn while it is read.

    Args:
        is_truncated: it was cut by the length limit.
        tools: of the conversation.

    Attributes:
        calls: read so far.
        malformed: lines about those that cannot be read.
        kept: text around calls, piece by piece.
        reasoning: of harmony's channel for it.
        is_full: no more calls are read, nor is the text behind them.
        kinds: by tool and argument, the kinds of values that its schema allows.
        names: of the tools.
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
            read: the call, or what is wrong with it; or returns the one or raises the other.
            missing: mark that should end the call and is not there.
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
        """Adds text that belongs to no call.

        Args:
            text: between calls, before and after them.
            strays: marks of calls, which have no place there: whatever they were to be is a malformed call.
        """
        if strays and (stray := strays.search(text)):
            self.add(DataError(f"{stray[0].strip()} stands outside of a call"))
            text = strays.sub("", text)
        self.kept.append(text)

    def parsed(self) -> ParsedText:
        """The turn, once all of it is read."""
        content = "".join(self.kept)
        if self.calls or self.malformed:
            content = content.strip()
        return ParsedText(
            content=content, reasoning=self.reasoning, calls=tuple(self.calls), malformed=tuple(self.malformed)
        )
