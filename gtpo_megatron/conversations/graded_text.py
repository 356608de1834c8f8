"""Sampled tokens as the text that graders of single turns read."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gtpo_megatron.conversations.tool_calls import find_form, parse_calls
from gtpo_megatron.untrusted.thinking import THINKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAST_IDS = 8
"""Ids at a prompt's end in which an opening mark and white space behind it are looked for."""


def thinking_marks(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str] | None:
    """The marks around a model's thinking, by its chat template or its vocabulary; None if it has none."""
    template, known = chat_template(tokenizer), tokenizer.get_vocab()
    return next((pair for pair in THINKING if pair[1] in template or pair[1] in known), None)


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The chat template; "" if there is none."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else ""


def special_text(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Matches special tokens, written as text; of those that decoding leaves out a tokenizer lists only some."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(one.content for one in added if one.special)}
    names = sorted(map(re.escape, special), key=len, reverse=True)
    return re.compile("|".join(names) or r"(?!)")


class GradedText:
    """Decodes responses.

    Special tokens are left out. Where they are the marks around thinking, as Mistral's are and the channels of gpt-oss,
    a grader could not tell the answer from the thinking any more: there the text is written with ``<think>`` and
    ``</think>``, as most models write it themselves.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._marks = thinking_marks(tokenizer)
        self._has_channels = find_form(chat_template(tokenizer)) == "harmony"
        self._loses_marks = self._has_channels or (self._marks is not None and not self._is_text(self._marks[1]))
        self._special = special_text(tokenizer)

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Every response as text."""
        texts: list[str] = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        if not self._loses_marks:
            return texts
        whole = self._tokenizer.batch_decode(responses, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [self._marked(text, with_marks) for text, with_marks in zip(texts, whole, strict=True)]

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark after which a model thinks, also one that it was not taught."""
        end: str = self._tokenizer.decode(list(prompt_ids[-_LAST_IDS:]), skip_special_tokens=False)
        return end.rstrip().endswith(tuple(opening for opening, _ in THINKING))

    def _is_text(self, mark: str) -> bool:
        """Decoding keeps it."""
        ids = self._tokenizer.encode(mark, add_special_tokens=False)
        return mark in self._tokenizer.decode(ids, skip_special_tokens=True)

    def _marked(self, text: str, with_marks: str) -> str:
        """The response with its marks, whether its thinking was opened here or by the prompt."""
        opening, closing = THINKING[0]
        if not self._has_channels:
            assert self._marks is not None
            written = dict(zip(self._marks, (opening, closing), strict=True))
            return self._special.sub(lambda found: written.get(found[0], ""), with_marks)
        if "<|message|>" not in with_marks:
            return text
        parsed = parse_calls(with_marks, "harmony")
        thinking, answer = self._special.sub("", parsed.reasoning), self._special.sub("", parsed.content)
        if not thinking:
            return answer
        return f"{opening}\n{thinking}\n{closing}\n\n{answer}" if answer else f"{opening}\n{thinking}"
