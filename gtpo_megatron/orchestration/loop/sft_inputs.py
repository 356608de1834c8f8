"""Reads the conversations of a warm start, those to learn from and those that are held out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.config.problems import HELDOUT, DatasetRef
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.conversations.demonstrations import (
    ConversationTokens,
    Demonstration,
    DemonstrationSet,
    load_demonstrations,
)
from gtpo_megatron.data.chat_template import TemplateInputs, asks_for_date, stop_token_ids, today
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.inputs import template_notes
from gtpo_megatron.run_folder.folder import TRAIN, DataContent, heldout_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class SftInputs:
    """What a warm start works on, read and checked before any process starts.

    Attributes:
        train: conversations to learn from.
        heldout: conversations whose loss is measured; none where nothing is held out.
        template_date: date that the chat template writes; as configured if it does not ask.
        notes: remarks of the reading, for the person who starts the run.
        contents: content of both sets, by their names in ``data.json``.
    """

    train: Sequence[Demonstration]
    heldout: Sequence[Demonstration]
    template_date: str
    notes: tuple[str, ...]
    contents: dict[str, DataContent]


def read_sft_inputs(config: SftConfig, tokenizer: "PreTrainedTokenizerBase", *, vocab_size: int) -> SftInputs:
    """Reads both data sets of a warm start.

    Args:
        config: configuration of the warm start.
        tokenizer: tokenizer of its model.
        vocab_size: size of the vocabulary of its model.

    Raises:
        ConfigError: a data set's name is unknown, the chat template has no such option or cannot join turns, or a step
            needs more conversations than there are.
        DataError: a data set is missing, empty or malformed.
    """
    data = config.data
    given = TemplateInputs(options=data.template_options, date=data.template_date or today())
    given.check(tokenizer)
    tokens = ConversationTokens(
        tokenizer,
        stop_ids=stop_token_ids(Path(config.model.path), tokenizer),
        given=given,
        verbatim_text=data.verbatim_text,
    )

    def load(dataset: DatasetRef) -> DemonstrationSet:
        return load_demonstrations(
            dataset,
            tokens,
            template=data.prompt_template,
            max_tokens=config.model.max_sequence_tokens,
            vocab_size=vocab_size,
        )

    training, held = _parted(load(data.train), None if data.heldout is None else load(data.heldout), data.heldout_rows)
    if data.rows_per_step > len(training.demonstrations):
        raise ConfigError(
            f"data.rows_per_step={data.rows_per_step} exceeds the {len(training.demonstrations)} conversations of "
            f"{data.train_path} that are trained; lower it"
        )
    contents = {TRAIN: _content(training)}
    if held is not None:
        contents[heldout_name(HELDOUT)] = _content(held)
    return SftInputs(
        train=training.demonstrations,
        heldout=() if held is None else held.demonstrations,
        template_date=given.date if asks_for_date(tokenizer) else data.template_date,
        notes=(*template_notes(tokenizer, given), *training.notes, *(() if held is None else held.notes)),
        contents=contents,
    )


def _parted(
    training: DemonstrationSet, held: DemonstrationSet | None, num_rows: int
) -> tuple[DemonstrationSet, DemonstrationSet | None]:
    """The conversations to learn from, and those that are measured; the latter from the training set's end, if need be.

    Raises:
        ConfigError: nothing would be left to learn from.
    """
    rows = training.demonstrations
    if held is not None:
        return training, replace(
            held, demonstrations=held.demonstrations[:num_rows] if num_rows else held.demonstrations
        )
    if not num_rows:
        return training, None
    if num_rows >= len(rows):
        raise ConfigError(
            f"data.heldout_rows={num_rows} leaves none of the {len(rows)} conversations to learn from; lower it, or "
            f"name others in data.heldout_path"
        )
    return (
        replace(training, demonstrations=rows[:-num_rows]),
        replace(training, demonstrations=rows[-num_rows:], notes=()),
    )


def _content(found: DemonstrationSet) -> DataContent:
    return DataContent(origin=found.origin, problems=len(found.demonstrations), problems_sha256=found.sha256)
