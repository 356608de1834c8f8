r"""Plays a conversation with an environment, without a model: what it says, its rewards and its errors.

::

    python -m gtpo_megatron.conversations.play FILE.py:Name '{"prompt": "6/2?", "answer": "3"}' \
        'divide({"a": 6, "b": 2})' 3

The second argument is the row; each further one is a turn of the policy: a text, or calls ``tool({...})``, one a line.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from gtpo_megatron.conversations.chat_endpoint import keep_from_proxies
from gtpo_megatron.conversations.environment import Episode, resolve_environment
from gtpo_megatron.conversations.messages import Message, ToolCall
from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.sentence import print_sentence
from gtpo_megatron.untrusted.json_text import parse_json

_CALL = re.compile(r"(\w+)\((\{.*\})?\)")


def main(arguments: Sequence[str]) -> int:
    """Prints the conversation; exit status 1 if the environment has failed."""
    console = Console()
    if len(arguments) < 2:
        print_sentence(console, (__doc__ or "").partition("::\n")[2].strip())
        return 2
    keep_from_proxies()
    try:
        asyncio.run(_played(console, arguments[0], arguments[1], arguments[2:]))
    except GTPOError as error:
        print_sentence(console, f"error: {error}")
        return 1
    return 0


async def _played(console: Console, name: str, row_json: str, turns: Sequence[str]) -> None:
    row = parse_json(row_json, "the row")
    if not isinstance(row, dict):
        raise DataError('the row: expected an object, such as {"prompt": "6/2?"}')
    episode = Episode(resolve_environment(name), _at_once)
    opening = await episode.open(row)
    for tool in opening.tools:
        print_sentence(console, f"tool: {tool['function']}")
    _say(console, opening.messages)
    for number, turn in enumerate(turns):
        message = _message(turn)
        _say(console, [message])
        reply = await episode.step(message)
        after = number if reply.after is None else reply.after
        if reply.is_again or after != number:
            print_sentence(console, f"  {'again, in place of' if reply.is_again else 'after'} turn {after + 1}:")
        if reply.opening is not None:
            print_sentence(console, "  a new sequence:")
        _say(console, reply.messages if reply.opening is None else reply.opening.messages)
        parts = "".join(f", {part} {value:g}" for part, value in reply.parts.items())
        errors = f", {reply.num_tool_errors} calls failed" if reply.num_tool_errors else ""
        print_sentence(console, f"  reward {reply.reward:g}{parts}{errors}{', done' if reply.done else ''}")
        if num_refused := episode.facts.get("num_refused"):
            print_sentence(console, f"  requests refused so far: {num_refused}; the first: {episode.facts['refusal']}")
        if reply.done:
            break
    await episode.close()


async def _at_once(method: Callable[[], Any]) -> Any:
    return method()


def _message(turn: str) -> Message:
    calls = [_CALL.fullmatch(line.strip()) for line in turn.splitlines()]
    if not calls or not all(calls):
        return Message(role="assistant", content=turn)
    made: list[ToolCall] = []
    for call in calls:
        assert call is not None
        arguments = parse_json(call[2] or "{}", f"arguments of {call[1]}")
        assert isinstance(arguments, dict), "it is in braces"
        made.append(ToolCall(name=call[1], arguments=arguments))
    return Message(role="assistant", tool_calls=tuple(made))


def _say(console: Console, messages: Sequence[Message]) -> None:
    for message in messages:
        who = f"{message.role} {message.tool}".strip()
        calls = [f"{call.name}({dict(call.arguments)})" for call in message.tool_calls]
        for text in (*([message.content] if message.content or not calls else []), *calls):
            print_sentence(console, f"{who}: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
