"""Messages as OpenAI writes them, and checks of what an environment returns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from gtpo_megatron.conversations.messages import Message, Opening, Reply, Role, ToolCall, plain
from gtpo_megatron.data.messages import REASONING_KEYS, content_text
from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.grade import checked
from gtpo_megatron.rewards.request import Reward
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

ROLES = get_args(Role)

KEYS = ("role", "content", *REASONING_KEYS, "tool_calls", "malformed_calls", "name", "tool_call_id")
"""Keys of a message. ``malformed_calls`` is ours: OpenAI has none. A row's message is one too."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Kinds of parts that are text."""


def message_from(value: object, where: str) -> Message:
    """A message, given as one or as OpenAI's dict.

    Args:
        value: the message as it was given; arguments of calls may be an object or its JSON text, and the content parts
            of text, of which each is a line.
        where: giver of the message, for errors.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, Message):
        return _checked_message(value, where)
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: got {shown(value)}, expected a Message or a dict with role and content")
    if unknown := [key for key in value if key not in KEYS]:
        raise DataError(f"{where}: a message has the key {shown(unknown[0])}; known: {', '.join(KEYS)}")
    role = value.get("role", "")
    message = Message(
        role="system" if role == "developer" else role,
        content=_content(value, where),
        reasoning=next((found for key in REASONING_KEYS if (found := _or_empty(value, key, ""))), ""),
        tool_calls=tuple(_call_from(call, where) for call in _listed(value, "tool_calls", where)),
        malformed_calls=tuple(_listed(value, "malformed_calls", where)),
        tool=_or_empty(value, "name", ""),
        call_id=_or_empty(value, "tool_call_id", ""),
    )
    return _checked_message(message, where)


def opening_from(returned: object, where: str) -> Opening:
    """What ``reset`` returned as an opening: one, messages, or the text of a user's message.

    Raises:
        DataError: it is none of these, or a message or a tool in it is wrong.
    """
    if isinstance(returned, str):
        returned = [Message(role="user", content=returned)]
    if not isinstance(returned, Opening):
        if not isinstance(returned, Sequence) or isinstance(returned, bytes | bytearray):
            raise DataError(f"{where} returned {shown(returned)}; expected an Opening, a list of messages or a text")
        returned = Opening(messages=tuple(returned))
    if returned.token_ids:
        if returned.messages or returned.tools:
            raise DataError(f"{where} returned both token ids and messages or tools; expected one of them")
        return Opening(token_ids=token_ids_from(returned.token_ids, where), stop=_checked_stop(returned.stop, where))
    messages = _messages_from(returned.messages, where)
    if not messages or messages[-1].role == "assistant":
        found = "one of the assistant" if messages else "none"
        raise DataError(f"{where} returned messages of which the last is {found}; expected one that the policy answers")
    tools = _checked_tools(returned.tools, where)
    return Opening(messages=messages, tools=tools, stop=_checked_stop(returned.stop, where))


def reply_from(returned: object, where: str) -> Reply:
    """What ``step`` returned as a reply of checked messages and finite numbers.

    Raises:
        DataError: it is no Reply, a value in it is wrong, it has messages and is done, or has none and is not.
    """
    if not isinstance(returned, Reply):
        raise DataError(f"{where} returned {shown(returned)}; expected a Reply")
    if not isinstance(returned.done, bool):
        raise DataError(f"{where} returned done={shown(returned.done)}; expected True or False")
    errors: Any = returned.num_tool_errors  # the user's, whatever the annotation says
    if not isinstance(errors, int) or errors < 0:
        raise DataError(f"{where} returned num_tool_errors={shown(errors)}; expected a number of calls")
    reward = checked(Reward(returned.reward, returned.parts), by=where)
    messages = _messages_from(returned.messages, where)
    token_ids = token_ids_from(returned.token_ids, where)
    if returned.done and (messages or token_ids):
        raise DataError(f"{where} returned done with messages: the policy would never read them")
    if messages and token_ids:
        raise DataError(f"{where} returned both token ids and messages; expected one of them")
    opening = None if returned.opening is None else opening_from(returned.opening, where)
    _check_branch(returned, has_messages=bool(messages or token_ids), where=where)
    if any(message.role == "assistant" for message in messages):
        raise DataError(f"{where} returned a message of the assistant, for which the policy speaks")
    return Reply(
        messages=messages,
        reward=reward.value,
        done=returned.done,
        num_tool_errors=int(errors),
        token_ids=token_ids,
        stop=_checked_stop(returned.stop, where),
        after=returned.after,
        is_again=returned.is_again,
        opening=opening,
        parts=reward.parts,
    )


def _check_branch(returned: Reply, *, has_messages: bool, where: str) -> None:
    """Raises DataError unless a reply says one thing about what the policy reads next."""
    after: Any = returned.after  # the user's, whatever the annotation says
    if not isinstance(returned.is_again, bool):
        raise DataError(f"{where} returned is_again={shown(returned.is_again)}; expected True or False")
    if not (after is None or (isinstance(after, int) and not isinstance(after, bool) and after >= 0)):
        raise DataError(f"{where} returned after={shown(after)}; expected the number of a turn, from 0, or None")
    has_opening = returned.opening is not None
    num_said = sum((returned.done, has_messages, has_opening, returned.is_again))
    if not num_said:
        raise DataError(f"{where} returned neither done nor a message: the policy would have nothing to answer")
    if num_said > 1:
        raise DataError(f"{where} returned several of done, messages, is_again and an opening; expected one of them")
    if after is not None and (returned.done or has_opening):
        raise DataError(f"{where} returned after={after} beside done or an opening, which follow no turn")
    if has_opening and returned.stop:
        raise DataError(f"{where} returned stop beside an opening, which has its own")


def token_ids_from(value: object, where: str) -> tuple[int, ...]:
    """Token ids, given as a sequence.

    Raises:
        DataError: they are none.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        wrong = next((one for one in value if isinstance(one, bool) or not isinstance(one, int) or one < 0), None)
        if wrong is None:
            return tuple(value)
        value = wrong
    raise DataError(f"{where}: got {shown(value)}, expected token ids")


def _messages_from(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise DataError(f"{where} returned {shown(value)} as messages; expected a list")
    return tuple(message_from(one, where) for one in value)


def _checked_message(message: Message, where: str) -> Message:
    if message.role not in ROLES:
        raise DataError(f"{where}: a message has role={shown(message.role)}; expected one of {', '.join(ROLES)}")
    for name in ("content", "reasoning", "tool", "call_id"):
        _check_text(getattr(message, name), f"{where}: a message has {name}=")
    if message.role != "assistant" and (message.tool_calls or message.malformed_calls):
        raise DataError(f"{where}: a message of role {message.role!r} calls tools; only the assistant's may")
    calls: Any = message.tool_calls  # the user's, whatever the annotation says
    for call in calls:
        if not isinstance(call, ToolCall) or not isinstance(call.arguments, Mapping):
            raise DataError(f"{where}: got the call {shown(call)}, expected a ToolCall with arguments by name")
        _check_text(call.name, f"{where}: a call has name=")
        _check_text(call.call_id, f"{where}: a call has call_id=")
    for malformed in message.malformed_calls:
        _check_text(malformed, f"{where}: a malformed call is ")
    return message


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{what}{shown(value)}; expected text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{what}text with half a surrogate pair, which no tokenizer takes") from error


def _checked_stop(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise DataError(f"{where} returned {shown(value)} as stop; expected a list of texts")
    for text in value:
        _check_text(text, f"{where} returned stop with ")
        if not text:
            raise DataError(f"{where} returned stop with an empty text, which would end the turn at once")
    return tuple(value)


def _checked_tools(value: object, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise DataError(f"{where} returned {shown(value)} as tools; expected a list")
    names: list[str] = []
    for tool in value:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(
                f"{where} returned the tool {shown(tool)}; expected {{'type': 'function', 'function': {{'name': ...}}}}"
            )
        names.append(function["name"])
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{where} returned two tools called {shown(twice[0])}")
    try:
        json.dumps(list(value), default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where} returned tools that JSON does not have: {error}") from error
    return tuple(value)


def _content(value: Mapping[str, Any], where: str) -> Any:
    """The content of a message, with its parts as rows have them."""
    content = _or_empty(value, "content", "")
    for part in content if isinstance(content, list | tuple) else ():
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            raise DataError(
                f"{where}: a message has the part {shown(part)}; expected text: the policy reads text alone"
            )
    return content_text(content)


def _call_from(value: object, where: str) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        raise DataError(
            f"{where}: got the call {shown(value)}, expected {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}: arguments of a call", half_pairs=True)
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: a call has arguments {shown(arguments)}; expected an object")
    return ToolCall(name=function.get("name", ""), arguments=arguments, call_id=_or_empty(value, "id", ""))


def _listed(value: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    found = _or_empty(value, key, ())
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise DataError(f"{where}: a message has {key}={shown(found)}; expected a list")
    return found


def _or_empty(value: Mapping[str, Any], key: str, empty: Any) -> Any:
    """The value of a key; ``empty`` if it is missing or None, which OpenAI writes for no content."""
    found = value.get(key)
    return empty if found is None else found
