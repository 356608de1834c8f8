"""A row of a data set, checked; and the form of rows of one's own.

Such a row holds ``prompt`` (chat messages or text), ``answer`` (text or a number; else ``reward_model.ground_truth``),
and maybe ``id`` and ``source`` (or ``data_source``).
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.prompt import BOXED_TEMPLATE, DAPO_TEMPLATE, PLACEHOLDER
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import shown

Record = Mapping[str, object]
"""One row as its file or the hub has it."""

Message = Mapping[str, str]
"""One chat message: ``role`` and ``content``."""


def _around(template: str) -> re.Pattern[str]:
    """Matches a question with the template around it, whatever the white space, with or without the last full stop."""
    before, after = (
        r"\s*".join(re.escape(word) for word in part.split()) for part in template.rstrip(".").split(PLACEHOLDER)
    )
    return re.compile(rf"\s*+{before}\s*+(?P<problem>.+?)\s*{after}\.?\s*", re.DOTALL)


_INSTRUCTIONS = (_around(BOXED_TEMPLATE), _around(DAPO_TEMPLATE))
"""Those that are put around questions here, and so stand around questions in files made for training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One problem as it stands in its source.

    Attributes:
        place: where it stands, for messages.
        prompt: chat messages, or plain text.
        answer: the reference answer.
        row_id: None where the source has none.
        source: name of the data set.
        is_bare: the prompt is the question alone; an instruction must be put around it.
    """

    place: str
    prompt: tuple[Message, ...] | str
    answer: str
    row_id: str | None
    source: str
    is_bare: bool = False

    @property
    def question(self) -> str:
        """The question alone, without instructions; what is compared between data sets."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        for instruction in _INSTRUCTIONS:
            if wrapped := instruction.fullmatch(text):
                return wrapped["problem"]
        return text

    @property
    def prompt_digest(self) -> bytes:
        """Tells prompts apart in 16 bytes."""
        messages = (
            [("", self.prompt)] if isinstance(self.prompt, str) else [(m["role"], m["content"]) for m in self.prompt]
        )
        text = "\0".join(part for message in messages for part in message)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def generic_row(record: Record, place: str, source: str) -> Row:
    """Checks a row of one's own.

    Raises:
        DataError: it is malformed.
    """
    return Row(
        place=place,
        prompt=_prompt(record, place),
        answer=_answer(record, place),
        row_id=optional_text(record, "id"),
        source=str(record.get("source") or record.get("data_source") or source),
    )


def _prompt(record: Record, place: str) -> tuple[Message, ...] | str:
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
        f"{place}: prompt is {shown_or_missing(prompt)}; expected text, or a list of messages, each with a role and a "
        f"content"
    )


def _answer(record: Record, place: str) -> str:
    """The field ``answer``, else ``reward_model.ground_truth``; numbers become text."""
    answer = record.get("answer")
    if answer is None:
        reward_model = record.get("reward_model")
        answer = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return answer_text(answer, place, "answer or reward_model.ground_truth")


def text_field(record: Record, names: Sequence[str], place: str) -> str:
    """The first of these fields that is there, as text.

    Raises:
        DataError: none is there, or it is not text or empty.
    """
    name = next((name for name in names if record.get(name) is not None), names[0])
    value = record.get(name)
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise DataError(
        f"{place}: {name} is {shown_or_missing(value)}; expected text in {' or '.join(names)}{_hint(record)}"
    )


def answer_text(value: object, place: str, where: str) -> str:
    """A reference answer: text, or a finite number.

    Raises:
        DataError: it is missing, empty or something else. NaN is how data frames write what is missing.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: answer is missing ({value}); expected text or a finite number in {where}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.strip()):
        raise DataError(f"{place}: answer is {shown_or_missing(value)}; expected text or a number in {where}")
    return str(value).strip()


def optional_text(record: Record, name: str) -> str | None:
    """The field as text; None where it is missing."""
    value = record.get(name)
    return None if value is None else str(value)


def shown_or_missing(value: object) -> str:
    """A value, short enough for a message."""
    return "missing" if value is None else shown(value)


def _hint(record: Record) -> str:
    """What to do with rows that were prepared for training already."""
    if "prompt" not in record:
        return ""
    return "; rows with a ready prompt are read under a name of your own, such as mine=FILE"
