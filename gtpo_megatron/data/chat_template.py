"""The tokenizer of a model folder, and prompts rendered with its chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.data.rows import Message
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SENTENCEPIECE_FILE = "tokenizer.model"
MAX_WORDS = 300
"""Characters of a library's error message that are quoted; some contain the whole file."""


def is_sentencepiece_only(folder: Path) -> bool:
    """Whether the folder has sentencepiece's model and no other file to build a tokenizer from."""
    others = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
    return (folder / SENTENCEPIECE_FILE).is_file() and not any((folder / name).exists() for name in others)


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a Hugging Face folder; never from the network.

    A folder with only sentencepiece's ``tokenizer.model`` is read by sentencepiece.

    Raises:
        DataError: no such folder, or no tokenizer in it that ``transformers`` can read.
    """
    from transformers import AutoTokenizer

    from gtpo_megatron.data.sentencepiece_tokenizer import load_sentencepiece

    if not Path(model_path).is_dir():
        raise DataError(f"{model_path}: no such folder; expected a Hugging Face model folder with its tokenizer files")
    try:
        if is_sentencepiece_only(Path(model_path)):
            tokenizer = load_sentencepiece(Path(model_path), SENTENCEPIECE_FILE)
        else:
            tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if not tokenizer.encode("0", add_special_tokens=False):  # transformers returns one for a config.json alone
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        raise DataError(
            f"{model_path}: no tokenizer in it ({type(error).__name__}: {printable(error)[:MAX_WORDS]}); "
            "expected tokenizer.json or the files of the model's own tokenizer"
        ) from error
    return tokenizer


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[Message] | str, *, verbatim_text: bool = False
) -> tuple[int, ...]:
    """Token ids of a prompt, up to where the response begins.

    Args:
        tokenizer: must have a chat template, unless the prompt is verbatim text.
        prompt: chat messages; or text, which becomes one user message.
        verbatim_text: take text as it is, without a template (base models).

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if isinstance(prompt, str) and verbatim_text:
        return tuple(tokenizer.encode(prompt))
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "add one to its folder, or give prompts as text and take them verbatim"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja2's errors, such as for an unknown role
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages: {printable(error)[:MAX_WORDS]}"
        ) from error
    # The template writes every special token itself, so the tokenizer must not add its own.
    return tuple(tokenizer.encode(text, add_special_tokens=False))
