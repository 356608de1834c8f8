"""Reads one field of a record, and says what is wrong with it and where."""

import math
from collections.abc import Mapping, Sequence

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown as in_one_line

Record = Mapping[str, object]
"""One row as its file has it."""


def as_record(value: object, place: str, expected: str) -> Record:
    """The row as a mapping.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: got {type(value).__name__}, expected an object with the fields {expected}")
    return value


def text_field(record: Record, names: Sequence[str], place: str) -> str:
    """The first of these fields that is there, as text.

    Raises:
        DataError: none is there, or it is not text or empty.
    """
    name = next((name for name in names if record.get(name) is not None), names[0])
    value = record.get(name)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise DataError(f"{place}: {name} is {shown(value)}; expected text in {' or '.join(names)}{_hint(record)}")


def answer_text(value: object, place: str, where: str) -> str:
    """A reference answer: text, or a finite number.

    Raises:
        DataError: it is missing, empty or something else. NaN is how data frames write what is missing.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: answer is missing ({value}); expected text or a finite number in {where}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.strip()):
        raise DataError(f"{place}: answer is {shown(value)}; expected text or a number in {where}")
    return str(value).strip()


def optional_text(record: Record, name: str) -> str | None:
    """The field as text; None where it is missing."""
    value = record.get(name)
    return None if value is None else str(value)


def shown(value: object) -> str:
    """A value, short enough for a message."""
    return "missing" if value is None else in_one_line(value)


def _hint(record: Record) -> str:
    """What to do with rows that were prepared for training already."""
    if "prompt" not in record:
        return ""
    return "; rows with a ready prompt are read under a name of your own, such as mine=FILE"
