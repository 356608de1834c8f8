"""The checked row of a data set, and the reader of the generic format.

A generic row has a prompt in ``prompt`` or ``messages`` (chat messages or text), or a bare question in ``problem`` or
``question``; a reference answer in ``answer``, ``ground_truth``, ``reward_model.ground_truth``,
``verification_info.ground_truth`` or ``solution`` (text or a number, a list of one, or an object that has it as its
``ground_truth`` or ``answer``), which rewards of other columns do not need; and optionally ``id`` and ``source`` (or
``data_source``). Messages, lists and objects may also be JSON or Python's literals in a text, as tables of text have
them. Messages may have calls of tools and their results, and the functions of a column ``tools`` are told to the
policy. All columns but the prompt are kept for the reward.
"""

import datetime
import decimal
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.problems import BOXED_TEMPLATE, CODE_TEMPLATE, DAPO_TEMPLATE, PLACEHOLDER
from gtpo_megatron.data.literal import literal
from gtpo_megatron.data.messages import ArrowRecord, Message, chat_messages, tools_of
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable, shown

Record = Mapping[str, object]
"""One unchecked row of a file or the hub."""


def _around(template: str) -> re.Pattern[str]:
    """Matches a question inside the template, with any white space and an optional last full stop."""
    before, after = (
        r"\s*".join(re.escape(word) for word in part.split()) for part in template.rstrip(".").split(PLACEHOLDER)
    )
    return re.compile(rf"\s*+{before}\s*+(?P<problem>.+?)\s*{after}\.?\s*", re.DOTALL)


_INSTRUCTIONS = (_around(BOXED_TEMPLATE), _around(DAPO_TEMPLATE), _around(CODE_TEMPLATE))
"""The instructions of this package, which rendered training files also contain."""


PROMPT_COLUMNS = ("prompt", "problem", "question", "messages")
"""Columns of the prompt; the first one present is used. A ``problem`` or ``question`` is bare."""

ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "verification_info.ground_truth", "solution")
"""Columns of the reference answer; the first one present is used."""

_INNER_ANSWERS = ("ground_truth", "answer")
"""Where an object that stands for the answer has it; an object without either is an answer of its own kind."""

_MEDIA_COLUMN = re.compile(r"(?:decoded_)?(image|video|audio)(s?)(?:_\w+)?", re.IGNORECASE)
"""Names of columns of what is no text: ``image``, ``images``, ``image_1``, ``decoded_image``, ``image_path``."""

_MEDIA_FILE = re.compile(
    r"data:(?:image|video|audio)/.*|.+\.(?:png|jpe?g|gif|webp|bmp|svg|tiff?|mp4|webm|mov|avi|mkv|wav|mp3|flac|ogg)(?:\?.*)?",
    re.IGNORECASE | re.DOTALL,
)
"""A file, an address or the content of one; a text in such a column may also be a container's image."""

_MEDIA_KEYS = ("bytes", "path", "url", "array")
"""An object with one of these is a file."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that are text."""

READY_COLUMNS = ("prompt", "messages")
"""Columns whose text is a whole prompt; a text in another one is a bare question."""

_COMMON = frozenset({"id", "answer", "source", "data_source"})
"""Columns that do not count to ``Row.extra``: the row has them as attributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One problem of a data set.

    Attributes:
        place: file and line, or row of the hub, for messages.
        prompt: chat messages, or plain text.
        answer: the reference answer; empty if there is none.
        row_id: id of the row; None if the source has none.
        source: name of the data set.
        is_bare: whether the prompt is only the question; an instruction must be added.
        columns_json: all columns but the prompt, as one JSON object.
        tools: functions that the policy may call.
        extra: the columns that no other attribute has, as JSON; empty if there are none.
        no_answer: reason why there is no reference answer; empty if there is one.
        no_text: reason why the prompt cannot be given as text, such as a picture; empty if it can.
    """

    place: str
    prompt: tuple[Message, ...] | str
    answer: str
    row_id: str | None
    source: str
    is_bare: bool = False
    columns_json: str = "{}"
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: str = ""
    no_answer: str = ""
    no_text: str = ""

    @property
    def extra_digest(self) -> bytes:
        """Digest of ``extra``, 16 bytes; empty if there is none."""
        return hashlib.blake2b(self.extra.encode(), digest_size=16).digest() if self.extra else b""

    @property
    def details(self) -> str:
        """Answer and other columns, without id and source, as text."""
        return f"{self.answer}\n{self.extra}"

    def check_answer(self) -> None:
        """Raises DataError if the row has no reference answer."""
        if self.no_answer:
            raise DataError(self.no_answer)

    @property
    def question(self) -> str:
        """The question without instructions, for comparing data sets: before results of tools, what the user asked."""
        text = self.prompt if isinstance(self.prompt, str) else _asked(self.prompt)
        for instruction in _INSTRUCTIONS:
            if wrapped := instruction.fullmatch(text):
                return wrapped["problem"]
        return text

    @property
    def prompt_digest(self) -> bytes:
        """Digest of the prompt with its tools, 16 bytes."""
        messages = [("", self.prompt)] if isinstance(self.prompt, str) else [_digested(m) for m in self.prompt]
        if self.tools:
            messages.append(("tools", json.dumps(self.tools, sort_keys=True, default=str)))
        text = "\0".join(part for message in messages for part in message)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _asked(messages: Sequence[Message]) -> str:
    """The last message's content; if that is a tool's, the last one of the user, if there is one."""
    last = messages[-1]
    if last["role"] == "tool":
        last = next((one for one in reversed(messages) if one["role"] == "user"), last)
    return str(last["content"])


def _digested(message: Message) -> tuple[str, ...]:
    """Role, content and, if there is more, that as JSON."""
    more = {key: value for key, value in message.items() if key not in ("role", "content")}
    plain = (message["role"], message["content"])
    return (*plain, json.dumps(more, sort_keys=True, default=str)) if more else plain


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumns:
    """Columns that have none of the usual names; ``a.b`` is ``b`` in the object ``a``.

    Attributes:
        prompt: column of the prompt; empty: the first of ``PROMPT_COLUMNS`` that is present.
        answer: column of the reference answer; empty: the first of ``ANSWER_COLUMNS``.
        usual_prompt: column that is used before ``PROMPT_COLUMNS`` in rows that have it; empty: none is.
        usual_answer: column that is used before ``ANSWER_COLUMNS`` in rows that have it; empty: none is.
    """

    prompt: str = ""
    answer: str = ""
    usual_prompt: str = ""
    usual_answer: str = ""


USUAL = RowColumns()


def generic_row(record: Record, place: str, source: str, columns: RowColumns = USUAL) -> Row:
    """Reads a row of the generic format.

    A row without a reference answer is allowed, see :meth:`Row.check_answer`.

    Raises:
        DataError: it is malformed.
    """
    usual = (name for name in _with(columns.usual_prompt, PROMPT_COLUMNS) if column_value(record, name) is not None)
    column = columns.prompt or next(usual, PROMPT_COLUMNS[0])
    answer, no_answer = "", ""
    try:
        answer = _answer(record, place, columns)
    except DataError as error:
        no_answer = str(error)
    kept, extra = other_columns(record, without=column)
    return Row(
        place=place,
        prompt=_prompt(record, column, place, is_named=bool(columns.prompt)),
        answer=answer,
        row_id=optional_text(record, "id"),
        source=str(record.get("source") or record.get("data_source") or source),
        is_bare=column not in READY_COLUMNS and isinstance(column_value(record, column), str),
        columns_json=kept,
        tools=tools_of(record),
        extra=extra,
        no_answer=no_answer,
        no_text=no_text_reason(record, column, place),
    )


def other_columns(record: Record, *, without: str) -> tuple[str, str]:
    """All columns but one, and those of them that no attribute of a row has, both as JSON; ``""`` if there are none."""
    columns = {name: plain_value(value) for name, value in record.items() if name != without}
    extra = {name: value for name, value in columns.items() if name not in _COMMON and value is not None}
    return _as_json(columns), _as_json(extra) if extra else ""


def plain_value(value: object) -> object:
    """A value of a column as JSON has it; NaN and infinities become None, times and decimals text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain_value(child) for key, child in value.items()}
        case list() | tuple():
            return [plain_value(child) for child in value]
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case datetime.date() | datetime.time() | datetime.timedelta() | decimal.Decimal():
            return str(value)
    return shown(value)


def _as_json(columns: Mapping[str, object]) -> str:
    return json.dumps(columns, separators=(",", ":"), sort_keys=True)


def column_value(record: Record, column: str) -> object:
    """The value of a column; ``a.b`` is ``b`` in the object ``a``, unless a column has that name."""
    if column in record:
        return record[column]
    outer, dot, inner = column.partition(".")
    value = literal(record.get(outer), "{") if dot else None
    return column_value(value, inner) if dot and isinstance(value, Mapping) else None


def _prompt(record: Record, column: str, place: str, *, is_named: bool) -> tuple[Message, ...] | str:
    """The prompt: text, or a list of messages with role and content, the last of which is not the assistant's."""
    prompt = column_value(record, column)
    if isinstance(prompt, str) and prompt.strip():
        messages = chat_messages(literal(prompt, "["), column, place)
        return messages or (prompt if column in READY_COLUMNS else prompt.strip())
    if messages := chat_messages(prompt, column, place, is_padded=isinstance(record, ArrowRecord)):
        return messages
    raise DataError(
        f"{place}: {column} is {shown_or_missing(prompt)}; expected text, or a list of messages, each with a role and "
        f"a content, in {column if is_named else _either(PROMPT_COLUMNS)}{_found(record, prompt, 'prompt')}"
    )


def no_text_reason(record: Record, column: str, place: str) -> str:
    """Names a part of a message or a column of the row that is a picture, a film or a sound; "" if there is none."""
    prompt = column_value(record, column)
    prompt = literal(prompt, "[") if isinstance(prompt, str) else prompt
    for message in prompt if isinstance(prompt, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in (None, *_TEXT_PARTS):
                return f"{place}: {column} has a part of the type {shown(kind)}; models are given text alone"
    for name, value in record.items():
        if found := _MEDIA_COLUMN.fullmatch(name):
            kind, plural = found[1].lower(), found[2]
            if _is_media(value, is_pointed_at=bool(plural) or f"<{kind}" in str(prompt)):
                return f"{place}: the row has {printable(name)}, {shown(value)}; models are given text alone"
    return ""


def _is_media(value: object, *, is_pointed_at: bool) -> bool:
    """Whether a column's value is a file; a text is one only if it, the prompt or the column's name says so."""
    if isinstance(value, Mapping):
        return any(key in value for key in _MEDIA_KEYS)
    if isinstance(value, list | tuple):
        return any(_is_media(one, is_pointed_at=is_pointed_at) for one in value)
    if isinstance(value, str):
        return bool(value.strip("[] ")) if is_pointed_at else _MEDIA_FILE.fullmatch(value.strip()) is not None
    return isinstance(value, bytes)


def _answer(record: Record, place: str, columns: RowColumns) -> str:
    """The named column, or the first usual one that is present; numbers become text."""
    names = (columns.answer,) if columns.answer else _with(columns.usual_answer, ANSWER_COLUMNS)
    answer = next((value for name in names if (value := column_value(record, name)) is not None), None)
    return answer_text(answer, place, f"{_either(names)}{_found(record, answer, 'answer')}")


def _with(first: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return (first, *names) if first else names


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _found(record: Record, value: object, option: str = "") -> str:
    """The columns that a row has, for a message about one that is missing, and the option that names another one."""
    if value is not None:
        return ""
    hint = f"; {option}_column names another one" if option else ""
    return f"; the row has the columns {printable(', '.join(map(str, record)) or 'none')}{hint}"


def text_field(record: Record, names: Sequence[str], place: str) -> str:
    """The first of these fields that is present, as text.

    Raises:
        DataError: none is present, or it is empty or not text.
    """
    name = next((name for name in names if record.get(name) is not None), names[0])
    value = record.get(name)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise DataError(
        f"{place}: {name} is {shown_or_missing(value)}; expected text in {' or '.join(names)}{_hint(record)}"
        f"{_found(record, value)}"
    )


def answer_text(value: object, place: str, where: str) -> str:
    """A reference answer: text, or a finite number; or a list with one of them, or an object that names it.

    List and object may be written in a text.

    Raises:
        DataError: it is missing (also as NaN), empty or of another type, or there are several.
    """
    named = literal(value, "{")
    if isinstance(named, Mapping) and (name := next((one for one in _INNER_ANSWERS if one in named), None)):
        return answer_text(named[name], place, where)
    listed = literal(value, "[")
    # ``[2]`` in a text is an answer with brackets, ``["2"]`` a list with an answer
    is_list = listed is not value and isinstance(listed, list) and all(isinstance(one, str) for one in listed)
    if is_list or isinstance(value, list | tuple):
        values = listed if isinstance(listed, list | tuple) else ()
        if len(values) != 1 or isinstance(values[0], list | tuple):
            raise DataError(f"{place}: answer is {shown(value)}, a list of {len(values)}; expected one in {where}")
        return answer_text(values[0], place, where)
    if isinstance(value, decimal.Decimal):  # of Parquet and of databases
        value = format(value, "f") if value.is_finite() else math.nan
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: answer is missing ({value}); expected text or a finite number in {where}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.strip()):
        raise DataError(f"{place}: answer is {shown_or_missing(value)}; expected text or a number in {where}")
    return str(value).strip()


def optional_text(record: Record, name: str) -> str | None:
    """The field as text; None if it is missing."""
    value = record.get(name)
    return None if value is None else str(value)


def shown_or_missing(value: object) -> str:
    """A value, short enough for a message."""
    return "missing" if value is None else shown(value)


def _hint(record: Record) -> str:
    """A hint for rows that already have a prompt."""
    if "prompt" not in record:
        return ""
    return "; rows with a ready prompt are read under a name of your own, such as mine=FILE"
