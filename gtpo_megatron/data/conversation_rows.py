"""Given conversations of a data set, to be learnt from: rows that end with what the assistant says.

A row is one of

- ``messages`` with turns of the assistant (what stands after the last of them is left out), in the form that prompts
  have, with calls of tools and a column ``tools``;
- a prompt and a completion, each a text or a list of messages. The prompt is in ``prompt``, ``problem``, ``question``
  or ``messages``, the completion in ``completion``, ``response``, ``solution`` or ``answer``; the first one present is
  used, or the column that is named.

A text is what one message says: the prompt a user's, the completion the assistant's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.data.literal import literal
from gtpo_megatron.data.messages import ArrowRecord, Message, chat_messages, tools_of
from gtpo_megatron.data.rows import PROMPT_COLUMNS, READY_COLUMNS, Record, column_value, no_text_reason, optional_text
from gtpo_megatron.data.source import records_of
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable

MESSAGES_COLUMN = "messages"

COMPLETION_COLUMNS = ("completion", "response", "solution", "answer")
"""Columns of a completion; the first one present is used. A worked solution comes before the bare answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRow:
    """One given conversation.

    Attributes:
        place: file and line, or row of the hub, for messages.
        row_id: its ``id``, or the name of the data set with the number of the row.
        messages: at least one of the assistant's, which is the last one.
        tools: functions that the prompt describes.
        is_bare: the prompt is a question without an instruction.
        is_text: prompt and completion are a text each.
    """

    place: str
    row_id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    is_bare: bool = False
    is_text: bool = False


def read_conversations(dataset: DatasetRef) -> Iterator[ConversationRow]:
    """Reads and checks a data set row by row; repeated prompts stay, since they may have other completions.

    Args:
        dataset: its ``prompt_column`` and ``answer_column`` name columns of prompt and completion.

    Raises:
        ConfigError: the name is unknown and no file is given.
        DataError: it cannot be read, a row is malformed, or there are none.
    """
    number = -1
    for number, (place, record) in enumerate(records_of(dataset)):
        yield _conversation(record, place, f"{dataset.name}-{number}", dataset.prompt_column, dataset.answer_column)
    if number < 0:
        raise DataError(f"{dataset}: holds no rows; expected at least one conversation")


def _conversation(record: Record, place: str, name: str, prompt_column: str, completion_column: str) -> ConversationRow:
    row_id, tools = optional_text(record, "id") or name, tools_of(record)
    if not completion_column and (whole := _turns(record, prompt_column or MESSAGES_COLUMN, place)):
        return ConversationRow(place=place, row_id=row_id, messages=whole, tools=tools)
    usual = (one for one in PROMPT_COLUMNS if column_value(record, one) is not None)
    column = prompt_column or next(usual, PROMPT_COLUMNS[0])
    prompt, is_text = _said(record, column, place, "user", options="prompt_column")
    named = (one for one in COMPLETION_COLUMNS if column_value(record, one) is not None)
    answers = completion_column or next(named, COMPLETION_COLUMNS[0])
    completion, is_text_too = _said(record, answers, place, "assistant", options="completion_column")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{place}: {column} ends with the assistant's turn, and {answers} is to follow a user's")
    if completion[-1]["role"] != "assistant":
        raise DataError(f"{place}: {answers} does not end with a turn of the assistant; leave out what follows it")
    return ConversationRow(
        place=place,
        row_id=row_id,
        messages=(*prompt, *completion),
        tools=tools,
        is_bare=is_text and column not in READY_COLUMNS,
        is_text=is_text and is_text_too,
    )


def _turns(record: Record, column: str, place: str) -> tuple[Message, ...]:
    """Messages of a column up to the assistant's last turn; () if it has none."""
    found = _messages(record, column, place)
    last = max((number for number, one in enumerate(found) if one["role"] == "assistant"), default=-1)
    if last == 0:
        raise DataError(f"{place}: {column} begins with the assistant's turn; expected one that it answers before it")
    return found[: last + 1]


def _said(record: Record, column: str, place: str, role: str, *, options: str) -> tuple[tuple[Message, ...], bool]:
    """What a column says, and whether it is a text: then it is one message of ``role``."""
    if found := _messages(record, column, place):
        return found, False
    value = column_value(record, column)
    if isinstance(value, str) and value.strip():
        return ({"role": role, "content": value},), True
    raise DataError(
        f"{place}: {column} has no text and no list of messages; expected a conversation in {MESSAGES_COLUMN}, or a "
        f"prompt in {', '.join(PROMPT_COLUMNS)} with a completion in {', '.join(COMPLETION_COLUMNS)}; the row has the "
        f"columns {printable(', '.join(map(str, record)) or 'none')}, and data.{options} names another one"
    )


def _messages(record: Record, column: str, place: str) -> tuple[Message, ...]:
    if reason := no_text_reason(record, column, place):
        raise DataError(f"{reason}; leave such rows out")
    value = column_value(record, column)
    is_padded = isinstance(record, ArrowRecord) and not isinstance(value, str)
    return chat_messages(literal(value, "["), column, place, is_padded=is_padded, may_answer=True)
