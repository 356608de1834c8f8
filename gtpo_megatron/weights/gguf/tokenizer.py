"""The tokenizer that a GGUF file describes, as a tokenizer of transformers that gives the original's tokens."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KIND = "gpt2"
"""``tokenizer.ggml.model`` of BPE over bytes. Of sentencepiece's, transformers makes other tokens of a first blank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Original:
    """What the original tokenizer does and transformers 5.19 leaves out when it reads a GGUF file.

    Attributes:
        composes: letters and their accents become one character (NFC).
        splits_digits: every digit is a piece of its own before the rest is split.
        ignores_merges: a piece that is a token becomes it, whether merges lead there or not.
        begins: text that no chat template wrote begins with the first special token, if the file does not say.
    """

    composes: bool = False
    splits_digits: bool = False
    ignores_merges: bool = False
    begins: bool = False


_LLAMA3 = _Original(ignores_merges=True, begins=True)
_ORIGINALS = {
    "gpt-2": _Original(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Original(composes=True),
    "smollm": _Original(splits_digits=True),
}
"""By ``tokenizer.ggml.pre``."""

MAX_WORDS = 300
"""Characters of a library's message that are quoted."""


def read_tokenizer(header: Header, *, max_tokens: int) -> "PreTrainedTokenizerBase":
    """The tokenizer, with special tokens and the chat template.

    Args:
        header: header of the file.
        max_tokens: length of the model's context; a longer text is warned of.

    Raises:
        ConfigError: there is none, of a kind that is not known, or transformers cannot read it.
    """
    place = printable(header.path)
    fields = Fields(dict(header.keys), place, ConfigError)
    kind = fields.get("tokenizer.ggml.model", str, "none")
    split = fields.get("tokenizer.ggml.pre", str, "none")
    if kind != _KIND or split not in _ORIGINALS:
        raise ConfigError(
            f"{place}: a tokenizer of kind {shown(kind)}, split by {shown(split)}, is not converted, as its tokens "
            f"might not be the original's; known: {_KIND} split by {', '.join(_ORIGINALS)}"
        )
    tokens = fields.get("tokenizer.ggml.tokens", list[str])
    begins = fields.get("tokenizer.ggml.add_bos_token", bool, _ORIGINALS[split].begins)
    try:
        tokenizer = _read_alone(header.path)
        if tokenizer.get_vocab() != {token: index for index, token in enumerate(tokens)}:
            raise ValueError("it gives some tokens other numbers than the file")
        _mend(tokenizer, _ORIGINALS[split], begins=begins)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, IndexError, ...
        raise ConfigError(
            f"{place}: transformers cannot read its tokenizer ({type(error).__name__}: {printable(error)[:MAX_WORDS]})"
        ) from error
    tokenizer.model_max_length = max_tokens
    for noise in ("is_local", "local_files_only"):  # how it was read, which is nothing of the tokenizer
        tokenizer.init_kwargs.pop(noise, None)
    return tokenizer


def _read_alone(path: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a file, read in a folder of its own: files beside it would take its place in transformers."""
    from transformers import AutoTokenizer  # takes seconds

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.gguf").symlink_to(path.resolve())
        return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf", local_files_only=True)


def _mend(tokenizer: "PreTrainedTokenizerBase", original: _Original, *, begins: bool) -> None:
    from tokenizers import normalizers, pre_tokenizers, processors

    backend, first = tokenizer.backend_tokenizer, tokenizer.bos_token
    if original.composes:
        backend.normalizer = normalizers.NFC()
    if original.splits_digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    backend.model.ignore_merges = original.ignores_merges
    if begins and first is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", f"{first}:1", "$B:1"],
            special_tokens=[(first, tokenizer.bos_token_id)],
        )
