"""Given conversations as tokens to learn: what the assistant says in them is trained, everything else is context."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from gtpo_megatron.batch import Problem, RolloutBatch
from gtpo_megatron.config.problems import DatasetRef, fill_template
from gtpo_megatron.conversations.messages import Message
from gtpo_megatron.conversations.template_bridge import MARKER, PROBE, TemplateBridge
from gtpo_megatron.data.chat_template import TemplateInputs, check_written, render_prompt, render_text
from gtpo_megatron.data.conversation_rows import ConversationRow, read_conversations
from gtpo_megatron.data.source import origin_of
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.text import printable, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_Rendered = Mapping[str, Any]
"""A message in the form that chat templates read."""

_RESULT: _Rendered = {"role": "tool", "name": "tool", "content": PROBE}
"""What would follow a call, where a conversation ends with one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration(Problem):
    """A problem with what is to be said to it, tokenised; ``answer`` is a digest of that.

    Attributes:
        response_ids: what follows the prompt, whoever says it; ends with the end of the assistant's last turn.
        loss_mask: which of these tokens the assistant says, ends of its turns included.
    """

    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationSet:
    """The usable conversations of a data set, in its order.

    Attributes:
        origin: the file, or the hub's repository, commit and split.
        demonstrations: at least one.
        num_dropped_long: conversations that are left out since they are too long.
        notes: sentences about these, for the log.
    """

    origin: str
    demonstrations: tuple[Demonstration, ...]
    num_dropped_long: int = 0
    notes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Digest of all tokens and of which are trained, in order."""
        digest = hashlib.sha256()
        for one in self.demonstrations:
            digest.update(f"{one.prompt_ids}\0{one.answer}\0".encode())
        return digest.hexdigest()


class ConversationTokens:
    """Writes given conversations as the policy will see and write them, by the model's own chat template.

    A turn is what the template writes for it behind the generation prompt, encoded by itself as a sampler would leave
    it, and trained up to the token that ends it. Between two turns stands what :class:`TemplateBridge` writes in
    reinforcement learning, so that a history is the same there: what was said stays, also where the template
    would rewrite it, such as thinking that it drops from earlier turns.

    Args:
        tokenizer: tokenizer with a chat template, unless all rows are texts that are taken verbatim.
        stop_ids: tokens that end a turn, as ``stop_token_ids`` reads them; the template's own end is added.
        given: inputs of the template besides the messages; None: the date alone.
        verbatim_text: take rows of two texts as they are, without the template; the end-of-sequence token is added.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_ids: Sequence[int] = (),
        given: TemplateInputs | None = None,
        verbatim_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._given = given or TemplateInputs()
        self._verbatim_text = verbatim_text

    def demonstration(self, row: ConversationRow, template: str) -> Demonstration:
        """The tokens of a row; ``template``: put around a bare question.

        Raises:
            DataError: the template refuses the messages, leaves something out, or writes a turn otherwise than it
                begins one.
            ConfigError: of a row with several turns: what follows a turn depends on what it said.
        """
        messages = row.messages
        if row.is_bare:
            messages = (
                {**messages[0], "content": fill_template(template, str(messages[0]["content"]).strip())},
                *messages[1:],
            )
        try:
            if self._verbatim_text and row.is_text:
                prompt_ids, response_ids = self._verbatim(*(str(one["content"]) for one in messages))
                loss_mask = [True] * len(response_ids)
            else:
                prompt_ids, response_ids, loss_mask = self._templated(messages, row.tools)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        said = hashlib.sha256(f"{response_ids}\0{loss_mask}".encode()).hexdigest()
        return Demonstration(
            problem_id=row.row_id,
            prompt_ids=prompt_ids,
            answer=said,
            prompt=messages,
            response_ids=tuple(response_ids),
            loss_mask=tuple(loss_mask),
        )

    def _verbatim(self, prompt: str, completion: str) -> tuple[tuple[int, ...], list[int]]:
        prompt_ids = render_prompt(self._tokenizer, prompt, verbatim_text=True)
        return prompt_ids, [*self._encode(completion), self._end_of_sequence()]

    def _templated(
        self, messages: Sequence[_Rendered], tools: Sequence[_Rendered]
    ) -> tuple[tuple[int, ...], list[int], list[bool]]:
        check_written(self._tokenizer, [dict(one) for one in messages], tools)
        turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        prompt_ids = render_prompt(self._tokenizer, messages[: turns[0]], given=self._given, tools=tools)
        response_ids: list[int] = []
        loss_mask: list[bool] = []

        def add(ids: Sequence[int], *, is_said: bool) -> None:
            response_ids.extend(ids)
            loss_mask.extend([is_said] * len(ids))

        for number, following in zip(turns, (*turns[1:], None), strict=True):
            turn, has_end = self._turn(messages[: number + 1], tools)
            add(turn, is_said=True)
            after: Sequence[int] = ()
            if following is not None:
                after = self._between(turn, messages[number + 1 : following])
            elif not has_end:
                calls = messages[number].get("tool_calls")
                after = self._between(turn, [_RESULT])[:1] if calls else self._end_mark
            if not has_end:  # the turn ends with the mark of who speaks next
                add(after[:1], is_said=True)
                after = after[1:]
            add(after, is_said=False)
        return prompt_ids, response_ids, loss_mask

    def _turn(self, messages: Sequence[_Rendered], tools: Sequence[_Rendered]) -> tuple[list[int], bool]:
        """Ids of the last message, up to the token that ends it, and whether there is such a token."""
        before = self._render(messages[:-1], tools, add_generation_prompt=True)
        whole = self._render(messages, tools, add_generation_prompt=False)
        if not whole.startswith(before):
            bare = self._render(messages[:-1], tools, add_generation_prompt=False)
            raise DataError(
                f"{self._place} begins a turn with {shown(before.removeprefix(bare))} where it asks for one, and with "
                f"{shown(whole.removeprefix(bare))} where one is given: what would be learnt does not follow what "
                f"the policy reads; mend the template, or take one that writes both alike"
            )
        ids = self._encode(whole[len(before) :])
        if not any(self._tokenizer.decode([one]).strip() for one in ids):
            raise DataError(f"{self._place} leaves out what the assistant says")
        place = max((place for place, one in enumerate(ids) if one in self._ends), default=None)
        if place is None or self._tokenizer.decode(ids[place + 1 :]).strip():
            return ids, False
        return ids[: place + 1], True

    def _between(self, turn: Sequence[int], messages: Sequence[_Rendered]) -> tuple[int, ...]:
        if not messages:
            raise DataError("a turn of the assistant follows another one; join them, or put the user's between them")
        return self._bridge.next_turn(turn, [_message(one) for one in messages])

    @cached_property
    def _bridge(self) -> TemplateBridge:
        return TemplateBridge(self._tokenizer, stop_ids=self._stop_ids, given=self._given)

    @cached_property
    def _end_mark(self) -> tuple[int, ...]:
        """The token that ends a turn: what the template writes behind it, or the mark of who speaks next."""
        turn = {"role": "assistant", "content": MARKER}
        try:
            text = self._render([{"role": "user", "content": "?"}, turn, {"role": "user", "content": PROBE}], ())
        except DataError:  # a template of one turn
            return (self._end_of_sequence(),)
        ids = self._encode(text.partition(MARKER)[2].partition(PROBE)[0])
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.get_added_vocab().values()}
        return next(((one,) for one in ids if one in special), (self._end_of_sequence(),))

    @cached_property
    def _ends(self) -> frozenset[int]:
        eos = self._tokenizer.eos_token_id
        return frozenset({*self._stop_ids, *self._end_mark, *(() if eos is None else (int(eos),))})

    def _end_of_sequence(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer of {printable(self._tokenizer.name_or_path)} has no eos_token, and nothing else ends a "
                f"turn: nobody could learn to stop; name one in its tokenizer_config.json"
            )
        return int(self._tokenizer.eos_token_id)

    def _render(
        self, messages: Sequence[_Rendered], tools: Sequence[_Rendered], *, add_generation_prompt: bool = False
    ) -> str:
        return render_text(
            self._tokenizer, messages, self._given, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    @property
    def _place(self) -> str:
        return f"the chat template of {printable(self._tokenizer.name_or_path)}"


def _message(rendered: _Rendered) -> Message:
    """A message of a row as the bridge takes it; none of the assistant's."""
    return Message(
        role=rendered["role"],
        content=str(rendered["content"]),
        tool=str(rendered.get("name", "")),
        call_id=str(rendered.get("tool_call_id", "")),
    )


def load_demonstrations(
    dataset: DatasetRef, tokens: ConversationTokens, *, template: str, max_tokens: int, vocab_size: int
) -> DemonstrationSet:
    """Reads and tokenises given conversations.

    One that is longer than ``max_tokens`` is left out whole, counted and reported: cut, it would teach to stop nowhere.

    Args:
        dataset: the data set.
        tokens: writes a row as tokens.
        template: instruction around bare questions.
        max_tokens: tokens of the longest conversation.
        vocab_size: tokens that the model knows.

    Raises:
        ConfigError: the name is unknown, or the template cannot join turns.
        DataError: no rows, a malformed one, a token that the model does not have, or every conversation is too long.
    """
    origin, found, dropped = origin_of(dataset), [], []
    for row in read_conversations(dataset):
        one = tokens.demonstration(row, template)
        if (largest := max((*one.prompt_ids, *one.response_ids))) >= vocab_size:
            raise DataError(
                f"{row.place}: the conversation has token id {largest}, and the model's vocabulary has ids below "
                f"vocab_size={vocab_size}: tokenizer and model do not fit; take the model's own tokenizer and template"
            )
        if one.num_tokens > max_tokens:
            dropped.append(one.num_tokens)
        else:
            found.append(one)
    if not found:
        raise DataError(
            f"{origin}: all {len(dropped)} conversations are longer than model.max_sequence_tokens={max_tokens}; the "
            f"shortest has {min(dropped)} tokens"
        )
    notes = []
    if dropped:
        notes.append(
            f"{origin}: {len(dropped)} of {len(found) + len(dropped)} conversations are longer than "
            f"model.max_sequence_tokens={max_tokens}, the longest {max(dropped)} tokens, and are left out"
        )
        logger.warning(notes[0])
    return DemonstrationSet(
        origin=origin, demonstrations=tuple(found), num_dropped_long=len(dropped), notes=tuple(notes)
    )


def demonstration_batch(demonstrations: Sequence[Demonstration]) -> RolloutBatch:
    """The batch of a trainer's pass over given conversations, each a group of its own.

    Returns:
        Of ``B`` conversations, with prompts and responses padded to the longest; nobody has sampled them, so log-probs
        are 0 and the policy version is 0.
    """

    def padded(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        matrix = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=dtype)
        for row, values in enumerate(rows):
            matrix[row, : len(values)] = torch.tensor(values, dtype=dtype)
        return matrix

    response_ids = padded([one.response_ids for one in demonstrations], torch.int64)
    return RolloutBatch(
        prompt_ids=padded([one.prompt_ids for one in demonstrations], torch.int64),
        prompt_lengths=torch.tensor([len(one.prompt_ids) for one in demonstrations]),
        response_ids=response_ids,
        response_lengths=torch.tensor([len(one.response_ids) for one in demonstrations]),
        loss_mask=padded([one.loss_mask for one in demonstrations], torch.bool),
        rollout_logprobs=torch.zeros(response_ids.shape),
        group_ids=torch.arange(len(demonstrations)),
        truncated=torch.zeros(len(demonstrations), dtype=torch.bool),
        policy_version=0,
    )
