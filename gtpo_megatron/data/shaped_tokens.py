"""Finds the tokens of responses that entropy shapes: all but formatting."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.chat_template import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANCHOR = "a"
"""Decoded in front of a token, because many tokenizers drop a leading space."""


class ShapedTokens:
    """Finds the tokens that overlap no match of one of the patterns.

    Patterns are matched against the response's text with special tokens. The text is joined from single decoded tokens,
    so that every character belongs to one token; each token of a character that several tokens encode is decoded as a
    replacement character.

    Args:
        tokenizer: the model's tokenizer.
        patterns: regular expressions of ``re``; they may span lines.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", patterns: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._texts: dict[int, str] = {}
        self._anchor_id: int = tokenizer.encode(_ANCHOR, add_special_tokens=False)[-1]
        self._anchor_text = self._decode([self._anchor_id])

    def mask(self, rollouts: RolloutBatch) -> Tensor:
        """True on tokens outside all matches, and at padding.

        Of a response with branches each sequence is a text, which decides about the tokens that are new in it.

        Returns:
            ``[B, T]`` bool on the CPU, the ``shaped_tokens`` of ``assign_credit``.
        """
        shaped = torch.ones(rollouts.response_ids.shape, dtype=torch.bool)
        for row, ids in enumerate(rollouts.response_ids.tolist()):
            for path in rollouts.paths(row):
                places = [place for first, last in path.stretches for place in range(first, last)]
                for first, last in self._token_spans([ids[place] for place in places]):
                    shaped[row, places[max(first, path.num_known) : last]] = False
        return shaped

    def _token_spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """First and last-plus-one token of every non-empty match."""
        texts = [self._text(token) for token in ids]
        text = "".join(texts)
        matches = [match.span() for pattern in self._patterns for match in pattern.finditer(text)]
        matches = [(first, last) for first, last in matches if first < last]
        if not matches:
            return []
        ends = torch.cumsum(torch.tensor([len(one) for one in texts]), 0)
        bounds = torch.tensor(matches)
        first = torch.searchsorted(ends, bounds[:, 0].contiguous(), right=True)  # first to end after the match begins
        last = torch.searchsorted(ends, bounds[:, 1].contiguous()) + 1  # first to reach its end
        return list(zip(first.tolist(), last.tolist(), strict=True))

    def _text(self, token: int) -> str:
        """The text of a token inside a response, cached."""
        if token not in self._texts:
            together = self._decode([self._anchor_id, token])
            has_anchor = together.startswith(self._anchor_text)
            self._texts[token] = together[len(self._anchor_text) :] if has_anchor else self._decode([token])
        return self._texts[token]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def shaped_tokens_of(model_path: str, patterns: Sequence[str]) -> ShapedTokens:
    """:class:`ShapedTokens` with the tokenizer of a Hugging Face folder.

    Raises:
        DataError: it has no tokenizer.
    """
    return ShapedTokens(load_tokenizer(model_path), patterns)
