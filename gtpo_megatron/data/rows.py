"""A row of a data set, checked; and the form of rows of one's own.

Such a row holds ``prompt`` (chat messages or text), ``answer`` (text or a number; else ``reward_model.ground_truth``),
and maybe ``id`` and ``source`` (or ``data_source``).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.prompt import BOXED_TEMPLATE, DAPO_TEMPLATE, PLACEHOLDER
from gtpo_megatron.data.fields import Record, answer_text, as_record, optional_text, shown
from gtpo_megatron.errors import DataError

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


def generic_row(record: object, place: str, source: str) -> Row:
    """Checks a row of one's own.

    Raises:
        DataError: it is malformed.
    """
    fields = as_record(record, place, "prompt and answer")
    return Row(
        place=place,
        prompt=_prompt(fields, place),
        answer=_answer(fields, place),
        row_id=optional_text(fields, "id"),
        source=str(fields.get("source") or fields.get("data_source") or source),
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
        f"{place}: prompt is {shown(prompt)}; expected text, or a list of messages, each with a role and a content"
    )


def _answer(record: Record, place: str) -> str:
    """The field ``answer``, else ``reward_model.ground_truth``; numbers become text."""
    answer = record.get("answer")
    if answer is None:
        reward_model = record.get("reward_model")
        answer = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return answer_text(answer, place, "answer or reward_model.ground_truth")
