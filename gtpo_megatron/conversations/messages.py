"""Messages of a conversation, and an environment's part in it.

A page with an environment of one's own needs these records only; they import neither torch nor vLLM.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

MAX_MESSAGE_BYTES = 4 << 20
"""Most bytes of a row, a message, an opening or a reply as JSON; more than a context holds."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that the policy asks for.

    Attributes:
        name: name of the tool.
        arguments: arguments by name, as parsed from the policy's text.
        call_id: id that the policy gave the call, if its family's form has one.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnStats:
    """How a turn of the policy was sampled.

    Attributes:
        num_prompt_tokens: tokens of the whole conversation before the turn.
        num_tokens: tokens of the turn, with the one that ended it.
        is_cut: whether a limit ended the turn, not the policy.
        token_ids: token ids of the turn, for environments that write tokens instead of messages.
        logprobs: log-probs of these tokens.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    is_cut: bool = False
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message.

    Attributes:
        role: speaker of the message.
        content: its text, without tool calls.
        reasoning: thinking that the policy's family writes apart from its answer.
        tool_calls: calls in the policy's message.
        malformed_calls: complaint about each call in it that cannot be read.
        tool: name of the tool whose result this is; of another message, ``name`` of who speaks.
        call_id: id of the call whose result this is.
        raw_text: whole text of a turn with a call that cannot be read, after its reasoning; "" otherwise.
        sampled: statistics of the policy's message in a run.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    tool: str = ""
    call_id: str = ""
    raw_text: str = ""
    sampled: TurnStats | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a conversation begins with.

    Attributes:
        messages: messages up to the policy's first turn.
        tools: tools that the policy may call, as OpenAI describes functions: ``{"type": "function", "function":
            {...}}``.
        token_ids: token ids of the whole prompt, in place of both.
        stop: texts of which one ends the policy's first turn, beside those of the run; it stays part of the turn.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An environment's answer to a turn of the policy.

    Attributes:
        messages: messages that the policy reads before its next turn; none if ``done``.
        reward: reward of the turn; that of the last one is the outcome's.
        done: whether the conversation has ended.
        num_tool_errors: calls of the turn that failed or could not be read.
        token_ids: token ids in place of messages, where the opening had such.
        stop: texts of which one ends the policy's next turn, beside those of the run; it stays part of the turn.
        after: number of the policy's turn that the messages follow, from 0; None: the one that is answered here.
        is_again: the policy is asked once more for what it has read before that turn; without messages.
        opening: what a new sequence of the episode begins with, in place of messages; the policy reads nothing else.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    num_tool_errors: int = 0
    token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    after: int | None = None
    is_again: bool = False
    opening: Opening | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, by name: metrics of the run, as those of a reward function."""


def message_json(message: Message) -> dict[str, Any]:
    """A message for another process, as JSON has it; :func:`message_of_json` reads it."""
    calls = [{**_fields_of(call), "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {
        **_fields_of(message),
        "tool_calls": calls,
        "sampled": None if message.sampled is None else asdict(message.sampled),
    }


def message_of_json(value: Mapping[str, Any]) -> Message:
    """A message from what :func:`message_json` wrote."""
    sampled = value["sampled"]
    return Message(
        **{
            **value,
            "tool_calls": tuple(ToolCall(**call) for call in value["tool_calls"]),
            "malformed_calls": tuple(value["malformed_calls"]),
            "sampled": None if sampled is None else TurnStats(**_with_tuples(sampled, "token_ids", "logprobs")),
        }
    )


def opening_json(opening: Opening) -> dict[str, Any]:
    """An opening for another process, as JSON has it; :func:`opening_of_json` reads it."""
    return {
        **_fields_of(opening),
        "messages": [message_json(one) for one in opening.messages],
        "tools": [dict(one) for one in opening.tools],
    }


def opening_of_json(value: Mapping[str, Any]) -> Opening:
    """An opening from what :func:`opening_json` wrote."""
    messages = tuple(message_of_json(one) for one in value["messages"])
    return Opening(**{**_with_tuples(value, "tools", "token_ids", "stop"), "messages": messages})


def reply_json(reply: Reply) -> dict[str, Any]:
    """A reply for another process, as JSON has it; :func:`reply_of_json` reads it."""
    return {
        **_fields_of(reply),
        "messages": [message_json(one) for one in reply.messages],
        "opening": None if reply.opening is None else opening_json(reply.opening),
        "parts": dict(reply.parts),
    }


def reply_of_json(value: Mapping[str, Any]) -> Reply:
    """A reply from what :func:`reply_json` wrote."""
    messages = tuple(message_of_json(one) for one in value["messages"])
    opening = None if value["opening"] is None else opening_of_json(value["opening"])
    return Reply(**{**_with_tuples(value, "token_ids", "stop"), "messages": messages, "opening": opening})


def plain(value: object) -> object:
    """A mapping that is no dict as one, as ``default`` of ``json.dumps``."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of the type {type(value).__name__}")


def _fields_of(record: Any) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)}


def _with_tuples(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**value, **{name: tuple(value[name]) for name in names}}
