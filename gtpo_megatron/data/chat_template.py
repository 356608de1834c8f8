"""The tokenizer of a model folder, prompts rendered with its chat template, and responses as text."""

import datetime
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.cycle_collector import without_collections
from gtpo_megatron.data.messages import REASONING_KEYS, TOOLS_COLUMN, Message
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import find_json
from gtpo_megatron.untrusted.text import printable, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SENTENCEPIECE_FILE = "tokenizer.model"
MAX_WORDS = 300
"""Characters of a library's error message that are quoted; some contain the whole file."""

CLOCK = "strftime_now"
"""What templates ask for the date, the only clock that transformers gives them."""

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers' own, around what the assistant says."""


def is_sentencepiece_only(folder: Path) -> bool:
    """Whether the folder has sentencepiece's model and no other file to build a tokenizer from."""
    others = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
    return (folder / SENTENCEPIECE_FILE).is_file() and not any((folder / name).exists() for name in others)


def check_stop_strings(folder: Path, sampling: SamplingConfig, *, where: str) -> None:
    """Raises ConfigError if responses are to end at strings, which vLLM cannot find with this folder's tokenizer.

    Args:
        folder: folder of the model.
        sampling: sampling options, with the strings.
        where: prefix of its options, such as ``rollout.sampling``.
    """
    if sampling.stop_strings and is_sentencepiece_only(folder):
        raise ConfigError(
            f"{where}.stop_strings: vLLM cannot spell the tokens of {folder}, which has sentencepiece's "
            f"tokenizer.model only; use {where}.stop_token_ids, or add a tokenizer.json"
        )


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a Hugging Face folder; never from the network.

    A folder with only sentencepiece's ``tokenizer.model`` is read by sentencepiece.

    Raises:
        DataError: no such folder, or no tokenizer in it that ``transformers`` can read.
    """
    if not Path(model_path).is_dir():
        raise DataError(f"{model_path}: no such folder; expected a Hugging Face model folder with its tokenizer files")
    is_sentencepiece = is_sentencepiece_only(Path(model_path))
    with without_collections():
        if is_sentencepiece:
            from gtpo_megatron.data.sentencepiece_tokenizer import load_sentencepiece  # some machines lack its library
        else:
            from transformers import AutoTokenizer
    try:
        if is_sentencepiece:
            tokenizer = load_sentencepiece(Path(model_path), SENTENCEPIECE_FILE)
        else:
            # not mistral-common's, which has no chat template, though a folder of Mistral has its files too
            tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, mistral_format=False)
        if not tokenizer.encode("0", add_special_tokens=False):  # transformers returns one for a config.json alone
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        raise DataError(
            f"{model_path}: no tokenizer in it ({type(error).__name__}: {printable(error)[:MAX_WORDS]}); "
            "expected tokenizer.json or the files of the model's own tokenizer"
        ) from error
    return tokenizer


def today() -> str:
    """The date of this machine, ``2026-01-31``."""
    return datetime.datetime.now().astimezone().date().isoformat()


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateInputs:
    """Everything that a chat template is given besides the messages.

    Attributes:
        options: variables of its own, such as ``enable_thinking``.
        date: day that the template takes for today, at midnight.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    date: str = field(default_factory=today)

    def read_by(self, tokenizer: "PreTrainedTokenizerBase") -> dict[str, object]:
        """``options`` and ``date``, as JSON values, as far as there are options and the template asks for the date."""
        read: dict[str, object] = {"options": dict(self.options)} if self.options else {}
        return read | {"date": self.date} if asks_for_date(tokenizer) else read

    def check(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises ConfigError for an option that the template does not mention, or that is not its own."""
        if not self.options:
            return
        known = _own_variables(tokenizer)
        for name in self.options:
            if name not in known:
                mentioned = f"it mentions {', '.join(sorted(known))}" if known else "it mentions none"
                raise ConfigError(
                    f"template_options: the chat template of {printable(tokenizer.name_or_path)} has no option "
                    f"{shown(name)}; {mentioned}"
                )


def asks_for_date(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether prompts depend on the day on which they are rendered."""
    return CLOCK in _variables(tokenizer)


def _variables(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The variables that the chat template reads and does not always set itself; empty without one that can be read."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        syntax = environment.parse(_GENERATION.sub("", tokenizer.get_chat_template()))
    except (ValueError, jinja2.TemplateError):  # none, or one that the first prompt is refused for
        return set()
    return set(jinja2.meta.find_undeclared_variables(syntax))


def _own_variables(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The variables of the chat template that are anybody's to choose."""
    taken = {CLOCK, "messages", "raise_exception", *tokenizer.special_tokens_map}
    taken |= set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"tools", "documents"}
    return _variables(tokenizer) - taken


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Message] | str,
    *,
    verbatim_text: bool = False,
    given: TemplateInputs | None = None,
    tools: Sequence[Mapping[str, object]] = (),
) -> tuple[int, ...]:
    """Token ids of a prompt, up to where the response begins.

    Args:
        tokenizer: tokenizer with a chat template, unless the prompt is verbatim text.
        prompt: chat messages; or text, which becomes one user message.
        verbatim_text: take text as it is, without a template (base models).
        given: inputs of the template besides the messages; None: the date alone.
        tools: tools of the row, which the prompt describes; verbatim text has none.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages or has no place for tools.
    """
    if isinstance(prompt, str) and verbatim_text:
        return _verbatim(tokenizer, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    # The template writes every special token itself, so the tokenizer must not add its own.
    check_written(tokenizer, messages, tools)
    text = render_text(tokenizer, messages, given or TemplateInputs(), tools=tools)
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def check_written(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
) -> None:
    """Raises DataError if the template would leave tools, calls of them or the thinking of turns out without a word."""
    _check_tools(tokenizer, messages, tools)
    _check_reasoning(tokenizer, messages)


def _verbatim(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    """Text as the tokenizer takes it, with one token at its begin where the text has that already."""
    ids = tuple(tokenizer.encode(text, verbose=False))  # the caller judges how long a prompt may be
    begin = tokenizer.bos_token
    is_twice = bool(begin) and text.startswith(str(begin)) and ids[:2] == (tokenizer.bos_token_id,) * 2
    return (
        ids[1:] if is_twice and len(ids) > len(tokenizer.encode(text, add_special_tokens=False, verbose=False)) else ids
    )


def _check_reasoning(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, object]]) -> None:
    """Raises DataError if the template reads the thinking of earlier turns by another name than a message has it."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    read = {key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)}
    for message in messages:
        has = [key for key in REASONING_KEYS if message.get(key)]
        if read and has and not read.intersection(has):
            raise DataError(
                f"the chat template of {printable(tokenizer.name_or_path)} reads {' or '.join(sorted(read))}, and a "
                f"turn of the assistant has {', '.join(has)}: call it as the template does, or leave it out"
            )


def _check_tools(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
) -> None:
    """Raises DataError if the template would leave tools out, or calls of them, without a word."""
    has_calls = any("tool_calls" in message for message in messages)
    if not tokenizer.chat_template or not (tools or has_calls):
        return
    template = tokenizer.get_chat_template(tools=list(tools) or None)
    place = f"the chat template of {printable(tokenizer.name_or_path)} has no place for"
    if tools and re.search(r"\btools\b", template) is None:
        raise DataError(
            f"{place} the {len(tools)} functions of the column {TOOLS_COLUMN!r}; take a model whose template has one, "
            f"or say them in the messages and call the column something else"
        )
    if has_calls and re.search(r"\btool_calls\b", template) is None:
        raise DataError(f"{place} calls of tools; take a model whose template has one, or write them into the contents")


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, object]],
    given: TemplateInputs,
    *,
    tools: Sequence[Mapping[str, object]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Messages as the chat template writes them.

    Args:
        tokenizer: tokenizer with the template.
        messages: messages in transformers' form: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id`` where
            there are.
        given: inputs of the template besides them.
        tools: JSON schemas of functions.
        add_generation_prompt: end with what the assistant's turn begins with.

    Raises:
        DataError: there is no template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "add one to its folder, or give prompts as text and take them verbatim"
        )
    day = datetime.datetime.fromisoformat(given.date)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{CLOCK: day.strftime},  # in the place of transformers' own, which asks the machine
            **{**given.options, **({"tools": list(tools)} if tools else {})},
        )
    except Exception as error:  # jinja2's errors, such as for an unknown role
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} refuses the messages: {printable(error)[:MAX_WORDS]}"
        ) from error
    assert isinstance(text, str)
    return text


def stop_token_ids(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end a response: the tokenizer's end of sequence, and those that the model folder declares.

    Those are in ``generation_config.json``, or else in ``config.json``; ascending.

    Raises:
        DataError: a file is not JSON, or declares no integers.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        if (content := find_json(folder / name)) is None:
            continue
        fields = Fields(content, printable(folder / name))
        if not fields.has("eos_token_id") and isinstance(fields.raw.get("text_config"), dict):
            fields = fields.fields("text_config")  # of a model that also sees
        if isinstance(declared := fields.raw.get("eos_token_id"), list):
            found |= set(fields.get("eos_token_id", list[int]))
        elif declared is not None:
            found.add(fields.get("eos_token_id", int))
        break
    return sorted(found)


SAMPLE_ANSWER = "forty-two"
"""A response, to see what the template writes after it."""


def unstopped_turn(
    tokenizer: "PreTrainedTokenizerBase",
    given: TemplateInputs,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str] = (),
) -> str:
    """A warning if the template ends the assistant's turn with something that ends no response; else "".

    Such is a base model's folder: it has ChatML as its template, and knows no end but ``<|endoftext|>``.

    Args:
        tokenizer: tokenizer with or without a template.
        given: inputs of the template besides the messages.
        stop_ids: tokens that end a response.
        stop_strings: texts that do.
    """
    if not tokenizer.chat_template:
        return ""
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAMPLE_ANSWER}]
    try:
        text = render_text(tokenizer, turn, given, add_generation_prompt=False)
    except DataError:  # a template of prompts alone
        return ""
    after = text.rpartition(SAMPLE_ANSWER)[2].strip()
    ids = tokenizer.encode(after, add_special_tokens=False) if after and SAMPLE_ANSWER in text else []
    if not ids or any(one and after.startswith(one) for one in stop_strings):
        return ""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    end = next((one for one in ids if one in special), ids[0])
    if end in stop_ids:
        return ""
    stops = ", ".join(f"{tokenizer.convert_ids_to_tokens(one)} ({one})" for one in stop_ids) or "none"
    return (
        f"the chat template of {printable(tokenizer.name_or_path)} ends a turn with "
        f"{tokenizer.convert_ids_to_tokens(end)} ({end}), and responses end at {stops}: a model that ends its turn as "
        f"the template does runs to the length limit; name {end} too, in eos_token_id of the folder's "
        f"generation_config.json or in sampling.stop_token_ids"
    )
