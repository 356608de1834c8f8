"""The tokenizer that a GGUF file describes, as a tokenizer of transformers that gives the original's tokens."""

from typing import TYPE_CHECKING

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import printable, shown
from gtpo_megatron.weights.gguf.header import Header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
"""Values of ``tokenizer.ggml.model``: BPE over bytes, and sentencepiece's BPE."""

_LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_DIGITS_FIRST = ("smollm",)
"""Digits are split one by one before GPT-2's expression splits the rest; transformers 5.19 leaves that out."""
_SPLITS = (*_LLAMA3_SPLITS, *_DIGITS_FIRST, "qwen2", "deepseek-r1-qwen", "gpt-2")
"""Values of ``tokenizer.ggml.pre`` of which it is known that the tokens are the original's."""

MAX_WORDS = 300
"""Characters of a library's message that are quoted."""


def read_tokenizer(header: Header, *, max_tokens: int) -> "PreTrainedTokenizerBase":
    """The tokenizer, with special tokens and the chat template.

    Args:
        header: of the file.
        max_tokens: of the model's context; a longer text is warned of.

    Raises:
        ConfigError: there is none, of a kind that is not known, or transformers cannot read it.
    """
    from transformers import AutoTokenizer  # takes seconds

    place = printable(header.path)
    fields = Fields(dict(header.keys), place, ConfigError)
    kind = fields.get("tokenizer.ggml.model", str, "none")
    split = fields.get("tokenizer.ggml.pre", str, "none")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE) or (kind == _BYTE_LEVEL and split not in _SPLITS):
        raise ConfigError(
            f"{place}: a tokenizer of kind {shown(kind)}, split by {shown(split)}, is not converted, as its tokens "
            f"might not be the original's; known: {_BYTE_LEVEL} with {', '.join(_SPLITS)}, and {_SENTENCEPIECE}"
        )
    tokens = fields.get("tokenizer.ggml.tokens", list[str])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name, local_files_only=True
        )
        if len(tokenizer.get_vocab()) != len(set(tokens)):
            raise ValueError(f"it has {len(tokenizer.get_vocab())} tokens, the file {len(set(tokens))}")
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, IndexError, ...
        raise ConfigError(
            f"{place}: transformers cannot read its tokenizer ({type(error).__name__}: {printable(error)[:MAX_WORDS]})"
        ) from error
    for noise in ("is_local", "local_files_only"):  # how it was read, which is nothing of the tokenizer
        tokenizer.init_kwargs.pop(noise, None)
    tokenizer.model_max_length = max_tokens
    if split in _DIGITS_FIRST:
        _split_digits(tokenizer)
    begins = fields.get("tokenizer.ggml.add_bos_token", bool, kind == _SENTENCEPIECE or split in _LLAMA3_SPLITS)
    _begin_text(tokenizer, begins=begins)
    return tokenizer


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _begin_text(tokenizer: "PreTrainedTokenizerBase", *, begins: bool) -> None:
    """Whether text that no chat template wrote begins with the first special token; transformers does not read that."""
    from tokenizers import processors

    first, first_id = tokenizer.bos_token, tokenizer.bos_token_id
    if begins and first is not None:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", f"{first}:1", "$B:1"], special_tokens=[(first, first_id)]
        )
    else:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
