"""Stage 1: reads a data set into tokenised problems."""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.problems import BOXED_TEMPLATE, DatasetRef, fill_template, parse_dataset
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.chat_template import TemplateInputs, render_prompt
from gtpo_megatron.data.contamination import Questions
from gtpo_megatron.data.rows import Row
from gtpo_megatron.data.source import origin_of
from gtpo_megatron.data.unique_rows import UniqueRows
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.text import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHOWN_TOKENS = 24
"""Of a prompt that cannot be used, in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsNeeded:
    """Columns and checks that the reward needs of a row.

    Attributes:
        answer: a reference answer.
        complaint: function of a row's columns as JSON that returns why it cannot be graded, or "".
        answer_complaint: function of a reference answer that returns why no response could earn it, or "".
        drops: leave out rows that cannot be graded, instead of refusing the data set; None: refuse, where no option
            asks for anything else.
        whole_rows: rows with one prompt are different problems where their other columns differ: an environment makes
            the problem.
    """

    answer: bool = True
    complaint: Callable[[str], str] = lambda _: ""
    answer_complaint: Callable[[str], str] = lambda _: ""
    drops: bool | None = False
    whole_rows: bool = False

    def refusal(self, row: Row) -> str:
        """Why a row is to be dropped, with its place; "" if it can be given to the model and graded.

        Raises:
            DataError: it cannot, and such rows are not to be dropped.
        """
        reason = row.no_text or (row.no_answer if self.answer else "")
        complaint = "" if reason else self.complaint(row.columns_json) or self.answer_complaint(row.answer)
        if complaint:
            reason = f"{row.place}: {complaint}"
        if reason and not self.drops:
            choice = "" if self.drops is None else ", or leave such rows out: data.ungradable_rows=drop"
            raise DataError(f"{reason}; mend the row{choice}")
        return reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """The usable problems of a data set, in its order.

    Attributes:
        dataset: the requested data set.
        origin: the file, or the hub's repository, commit and split.
        problems: problems, at least one; their ids are unique.
        questions: the question of each problem without instructions, for comparing data sets.
        details: further columns of each problem, if an environment makes it; see ``Questions``.
        prompt_digests: digest of each problem's prompt before rendering, and of its other columns if it has any.
        num_rows: rows read.
        num_repeated: rows dropped because they repeat an earlier one.
        num_conflicting: repeated rows whose answer differs from the first one's, which is kept.
        num_dropped_long: problems dropped because their prompt is too long.
        notes: sentences about dropped rows, for the log.
        num_ungradable: rows dropped because they have no answer, or the reward cannot grade them, or they are no text.
        content_sha256: digest of ids, prompts, answers and other columns of all rows that are not repeats.
        longest_prompt: tokens of the longest prompt that was dropped; 0 if none was.
        template_inputs: options and date that the prompts were rendered with, as JSON; "" where the template reads
            neither.
    """

    dataset: DatasetRef
    origin: str
    problems: tuple[Problem, ...]
    questions: tuple[str, ...]
    prompt_digests: tuple[bytes, ...]
    num_rows: int
    num_repeated: int
    num_conflicting: int
    num_dropped_long: int
    num_ungradable: int
    notes: tuple[str, ...]
    content_sha256: str
    longest_prompt: int = 0
    details: tuple[str, ...] = ()
    template_inputs: str = ""

    @property
    def used_sha256(self) -> str:
        """Digest of the prompts before rendering, the answers and other columns of the problems, in order.

        It depends on what the chat template was given besides the messages, and not on tokenizer, template, path or
        name.
        """
        digest = hashlib.sha256(self.template_inputs.encode())
        for problem, prompt_digest in zip(self.problems, self.prompt_digests, strict=True):
            digest.update(f"{problem.answer}\0".encode("utf-8", "surrogatepass") + prompt_digest)
        return digest.hexdigest()

    @property
    def comparable(self) -> Questions:
        """The questions, for :func:`~gtpo_megatron.data.contamination.find_contamination`."""
        ids = tuple(problem.problem_id for problem in self.problems)
        return Questions(ids=ids, texts=self.questions, details=self.details)

    def only(self, is_used: Sequence[bool], note: str) -> "ProblemSet":
        """The set with these of its problems, and a note that says why."""
        return replace(
            self,
            problems=tuple(itertools.compress(self.problems, is_used)),
            questions=tuple(itertools.compress(self.questions, is_used)),
            prompt_digests=tuple(itertools.compress(self.prompt_digests, is_used)),
            details=tuple(itertools.compress(self.details, is_used)),
            notes=(*self.notes, note),
        )

    def head(self, num: int) -> "ProblemSet":
        """The first ``num`` problems; 0 keeps all."""
        if not num:
            return self
        return replace(
            self,
            problems=self.problems[:num],
            questions=self.questions[:num],
            details=self.details[:num],
            prompt_digests=self.prompt_digests[:num],
        )


def load_problems(
    dataset: DatasetRef | str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_tokens: int,
    verbatim_text: bool = False,
    template: str = BOXED_TEMPLATE,
    graded_by: RowsNeeded | None = None,
    given: TemplateInputs | None = None,
    vocab_size: int | None = None,
) -> ProblemSet:
    """Reads, renders and tokenises a data set.

    Of rows with the same prompt the first is kept and the others are counted, see ``UniqueRows``. A row without an id
    is named after its data set and its row number.

    Args:
        dataset: a file, or a known data set, see :mod:`gtpo_megatron.config.problems`.
        tokenizer: the model's tokenizer.
        max_prompt_tokens: longest prompt; longer ones are dropped, counted and reported.
        verbatim_text: take text prompts as they are, without the chat template.
        template: instruction around bare questions; ``{problem}`` stands for the question.
        graded_by: needs of the reward; None: a reference answer.
        given: inputs of the chat template besides the messages; None: today's date alone.
        vocab_size: tokens that the model knows; None does not compare token ids with it.

    Raises:
        ConfigError: ``max_prompt_tokens`` is not positive, the data set's name is unknown, or the chat template has no
            such option.
        DataError: no rows, a malformed row, one that the reward cannot grade, one id for two prompts, a token that the
            model does not have, or every prompt is too long.
    """
    graded_by = graded_by or RowsNeeded()
    given = given or TemplateInputs()
    given.check(tokenizer)
    if max_prompt_tokens < 1:
        raise ConfigError(f"max_prompt_tokens={max_prompt_tokens}: must be at least 1")
    dataset = parse_dataset(dataset, "data set") if isinstance(dataset, str) else dataset
    origin = origin_of(dataset)
    reading = UniqueRows(whole_rows=graded_by.whole_rows)
    problems: list[Problem] = []
    questions: list[str] = []
    details: list[str] = []
    prompt_digests: list[bytes] = []
    dropped: list[int] = []
    ungradable: list[str] = []
    for problem_id, row in reading.read(dataset):
        if reason := graded_by.refusal(row):
            ungradable.append(reason)
            reading.forget(problem_id, row)
            continue
        prompt = fill_template(template, row.question) if row.is_bare else row.prompt
        try:
            tools = () if graded_by.whole_rows else row.tools  # an environment says which tools there are
            prompt_ids = render_prompt(tokenizer, prompt, verbatim_text=verbatim_text, given=given, tools=tools)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        if vocab_size is not None and max(prompt_ids, default=0) >= vocab_size:
            raise DataError(f"{row.place}: {_unknown_token(tokenizer, prompt_ids, vocab_size)}")
        if len(prompt_ids) > max_prompt_tokens:
            dropped.append(len(prompt_ids))
            continue
        problems.append(
            Problem(
                problem_id=problem_id,
                prompt_ids=prompt_ids,
                answer=row.answer,
                source=row.source,
                prompt=prompt,
                columns_json=row.columns_json,
            )
        )
        questions.append(row.question)
        details.append(row.details)
        prompt_digests.append(row.prompt_digest + row.extra_digest)
    if not problems:
        raise DataError(_none_left(origin, ungradable, dropped, max_prompt_tokens))
    notes = _notes(dataset, origin, reading, len(dropped), max_prompt_tokens)
    if ungradable:
        notes.append(f"{origin}: {len(ungradable)} rows cannot be graded and are left out; the first: {ungradable[0]}")
    for note in notes:
        logger.warning(note)
    content = reading.content.hexdigest()
    read = json.dumps(reads, sort_keys=True) if (reads := given.read_by(tokenizer)) else ""
    logger.info("%s: %d problems, content %s%s", origin, len(problems), content[:16], f", template {read}" * bool(read))
    return ProblemSet(
        dataset=dataset,
        origin=origin,
        problems=tuple(problems),
        questions=tuple(questions),
        details=tuple(details) if graded_by.whole_rows else (),
        prompt_digests=tuple(prompt_digests),
        num_rows=reading.num_rows,
        num_repeated=reading.num_repeated,
        num_conflicting=reading.num_conflicting,
        num_dropped_long=len(dropped),
        longest_prompt=max(dropped, default=0),
        num_ungradable=len(ungradable),
        notes=tuple(notes),
        content_sha256=hashlib.sha256(f"{content}{read}".encode()).hexdigest() if read else content,
        template_inputs=read,
    )


def _unknown_token(tokenizer: "PreTrainedTokenizerBase", prompt_ids: Sequence[int], vocab_size: int) -> str:
    """The first token of a prompt that the model has no embedding for."""
    place, first = next((place, one) for place, one in enumerate(prompt_ids) if one >= vocab_size)
    return (
        f"the rendered prompt has token {shown(tokenizer.convert_ids_to_tokens(first))} with id {first} at place "
        f"{place}, and the model's vocabulary has ids below vocab_size={vocab_size}: tokenizer and model do not fit; "
        f"resize the model's embeddings to the tokenizer, or take the model's own tokenizer and template; the prompt "
        f"begins {shown(tokenizer.decode(list(prompt_ids[:SHOWN_TOKENS])))}"
    )


def _none_left(origin: str, ungradable: Sequence[str], dropped: Sequence[int], max_prompt_tokens: int) -> str:
    """Why no problem is usable."""
    if not dropped:
        return f"{origin}: none of {len(ungradable)} rows can be graded; the first: {ungradable[0]}"
    return (
        f"{origin}: all {len(dropped)} prompts are longer than max_prompt_tokens={max_prompt_tokens}; "
        f"the shortest has {min(dropped)} tokens"
    )


def _notes(
    dataset: DatasetRef, origin: str, reading: UniqueRows, num_dropped: int, max_prompt_tokens: int
) -> list[str]:
    """Sentences about dropped rows and an unexpected number of problems."""
    notes = []
    num_unique = reading.num_rows - reading.num_repeated
    if num_passed := reading.passed.num_rows:
        notes.append(
            f"{origin}: {num_passed} of {reading.num_rows + num_passed} rows are not of {reading.passed.known}, the "
            f"data set that is known there, and are left out"
        )
    if reading.num_repeated:
        notes.append(
            f"{origin}: {reading.num_repeated} of {reading.num_rows} rows repeat an earlier prompt and are left out "
            f"({reading.num_conflicting} of them with another answer); {num_unique} remain"
        )
    if num_dropped:
        notes.append(f"{origin}: dropped {num_dropped} of {num_unique} prompts, longer than {max_prompt_tokens} tokens")
    adapter = ADAPTERS.get(dataset.name) if dataset.is_named else None
    if adapter and adapter.num_problems and num_unique != adapter.num_problems:
        notes.append(
            f"{origin}: {num_unique} different problems; {adapter.name} is known to have {adapter.num_problems}"
        )
    return notes
