"""Rows of a data set, as DAPO-Math-17k and AIME files have them, from JSONL or Parquet.

A row holds ``prompt`` (chat messages or text), ``answer`` (text or a number; else ``reward_model.ground_truth``), and
maybe ``id`` and ``source``. Whatever is wrong is reported with its place: file and line, or file and row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.errors import DataError

Message = Mapping[str, str]
"""One chat message: ``role`` and ``content``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One problem as it stands in the file.

    Attributes:
        place: where it stands, for messages: ``train.jsonl:7`` or ``train.parquet, row 7`` (both count from 1).
        prompt: chat messages, or plain text.
        answer: the reference answer.
        row_id: None where the file has none.
        source: name of the data set; the file's stem where the file has none.
    """

    place: str
    prompt: tuple[Message, ...] | str
    answer: str
    row_id: str | None
    source: str


def read_rows(path: str) -> Iterator[Row]:
    """Reads a file row by row, checked.

    Args:
        path: ends in ``.jsonl`` or ``.parquet``.

    Raises:
        DataError: no such file, another ending, a row that is malformed, or no rows at all.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file; give the path of a .jsonl or .parquet file")
    if file.suffix == ".jsonl":
        records = _read_jsonl(file)
    elif file.suffix == ".parquet":
        records = _read_parquet(file)
    else:
        raise DataError(f"{path}: got the ending {file.suffix!r}, expected .jsonl or .parquet")
    empty = True
    for place, record in records:
        empty = False
        yield _to_row(record, place, default_source=file.stem)
    if empty:
        raise DataError(f"{path}: holds no rows; expected at least one problem")


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    """One JSON value a line; line by line, because only so a broken one can be named. Blank lines are passed over."""
    with file.open("rb") as lines:  # bytes: a text file decodes ahead, and would blame an earlier line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file}:{number}"
                try:
                    record = json.loads(line.decode("utf-8"))
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise DataError(f"{place}: not a JSON object: {error}; fix or remove the line") from error
                yield place, record


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    """Rows of a Parquet file; ``datasets`` is imported here alone, since it takes seconds."""
    import datasets

    try:
        table = datasets.Dataset.from_parquet(str(file), keep_in_memory=False)
    except Exception as error:  # whatever pyarrow or datasets raise on a broken file
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
    for number, record in enumerate(table, start=1):
        yield f"{file}, row {number}", record


def _to_row(record: object, place: str, *, default_source: str) -> Row:
    """Checks one record."""
    if not isinstance(record, Mapping):
        raise DataError(f"{place}: got {type(record).__name__}, expected an object with the fields prompt and answer")
    row_id = record.get("id")
    source = record.get("source") or record.get("data_source") or default_source
    return Row(
        place=place,
        prompt=_prompt(record, place),
        answer=_answer(record, place),
        row_id=None if row_id is None else str(row_id),
        source=str(source),
    )


def _prompt(record: Mapping[str, object], place: str) -> tuple[Message, ...] | str:
    """The field ``prompt``: text, or a list of messages with role and content."""
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        messages = [message for message in prompt if isinstance(message, Mapping)]
        texts = [message.get(key) for message in messages for key in ("role", "content")]
        if len(messages) == len(prompt) and all(isinstance(text, str) and text for text in texts):
            return tuple({"role": str(message["role"]), "content": str(message["content"])} for message in messages)
    raise DataError(
        f"{place}: prompt is {_shown(prompt)}; expected text, or a list of messages, each with a role and a content"
    )


def _answer(record: Mapping[str, object], place: str) -> str:
    """The field ``answer``, else ``reward_model.ground_truth``; numbers become text."""
    answer = record.get("answer")
    if answer is None:
        reward_model = record.get("reward_model")
        answer = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise DataError(
            f"{place}: answer is {_shown(answer)}; expected text or a number in answer or reward_model.ground_truth"
        )
    return str(answer).strip()


def _shown(value: object) -> str:
    """A value, short enough for a message."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
