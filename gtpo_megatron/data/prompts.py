"""Stage 1: reads a data set into tokenised problems."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.problems.dataset import DatasetRef, parse_dataset
from gtpo_megatron.config.problems.prompt import BOXED_TEMPLATE, fill_template
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.chat_template import render_prompt
from gtpo_megatron.data.contamination import Questions
from gtpo_megatron.data.rows import Row
from gtpo_megatron.data.source import origin_of
from gtpo_megatron.data.unique_rows import UniqueRows
from gtpo_megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsNeeded:
    """What the reward needs of a row.

    Attributes:
        answer: a reference answer.
        complaint: takes a row's columns as JSON; why it cannot be graded, or "".
        drops: leave out rows that cannot be graded, instead of refusing the data set.
    """

    answer: bool = True
    complaint: Callable[[str], str] = lambda _: ""
    drops: bool = False

    def refusal(self, row: Row) -> str:
        """Why a row is to be dropped, with its place; "" if it can be graded.

        Raises:
            DataError: it cannot be graded, and such rows are not to be dropped.
        """
        reason = self.complaint(row.columns_json)
        if reason and not self.drops:
            raise DataError(f"{row.place}: {reason}; mend the row, or leave such rows out: data.ungradable_rows=drop")
        return f"{row.place}: {reason}" if reason else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """The usable problems of a data set, in its order.

    Attributes:
        dataset: the requested data set.
        origin: the file, or the hub's repository and commit.
        problems: at least one; their ids are unique.
        questions: the question of each problem without instructions, for comparing data sets.
        prompt_digests: digest of each problem's prompt before rendering, and of its other columns if it has any.
        num_rows: rows read.
        num_repeated: rows dropped because an earlier one has the same prompt.
        num_conflicting: repeated rows whose answer differs from the first one's, which is kept.
        num_dropped_long: problems dropped because their prompt is too long.
        notes: sentences about dropped rows, for the log.
        num_ungradable: rows dropped because the reward cannot grade them.
        content_sha256: digest of ids, prompts, answers and other columns of all rows that are not repeats.
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

    @property
    def used_sha256(self) -> str:
        """Digest of the prompts before rendering, the answers and other columns of the problems, in order.

        It does not depend on tokenizer, template, path or name.
        """
        digest = hashlib.sha256()
        for problem, prompt_digest in zip(self.problems, self.prompt_digests, strict=True):
            digest.update(f"{problem.answer}\0".encode("utf-8", "surrogatepass") + prompt_digest)
        return digest.hexdigest()

    @property
    def comparable(self) -> Questions:
        """The questions, for :func:`~gtpo_megatron.data.contamination.find_contamination`."""
        return Questions(ids=tuple(problem.problem_id for problem in self.problems), texts=self.questions)

    def head(self, num: int) -> "ProblemSet":
        """The first ``num`` problems; 0 keeps all."""
        if not num:
            return self
        return replace(
            self,
            problems=self.problems[:num],
            questions=self.questions[:num],
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
) -> ProblemSet:
    """Reads, renders and tokenises a data set.

    Of rows with the same prompt the first is kept and the others are counted. A row without an id is named after its
    data set and its row number.

    Args:
        dataset: a file, or a known data set, see :mod:`gtpo_megatron.config.problems.dataset`.
        tokenizer: the model's tokenizer.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        verbatim_text: take text prompts as they are, without the chat template.
        template: instruction around bare questions; ``{problem}`` stands for the question.
        graded_by: what the reward needs of a row; None: a reference answer.

    Raises:
        ConfigError: ``max_prompt_tokens`` is not positive, or the data set's name is unknown.
        DataError: no rows, a malformed row, one that the reward cannot grade, one id for two prompts, or every prompt
            is too long.
    """
    graded_by = graded_by or RowsNeeded()
    if max_prompt_tokens < 1:
        raise ConfigError(f"max_prompt_tokens={max_prompt_tokens}: must be at least 1")
    dataset = parse_dataset(dataset, "data set") if isinstance(dataset, str) else dataset
    origin = origin_of(dataset)
    reading = UniqueRows()
    problems: list[Problem] = []
    questions: list[str] = []
    prompt_digests: list[bytes] = []
    dropped: list[int] = []
    ungradable: list[str] = []
    for problem_id, row in reading.read(dataset, needs_answer=graded_by.answer):
        if reason := graded_by.refusal(row):
            ungradable.append(reason)
            continue
        prompt = fill_template(template, row.question) if row.is_bare else row.prompt
        try:
            prompt_ids = render_prompt(tokenizer, prompt, verbatim_text=verbatim_text)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
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
        prompt_digests.append(row.prompt_digest + row.extra_digest)
    if not problems:
        raise DataError(_none_left(origin, ungradable, dropped, max_prompt_tokens))
    notes = _notes(dataset, origin, reading, len(dropped), max_prompt_tokens)
    if ungradable:
        notes.append(f"{origin}: {len(ungradable)} rows cannot be graded and are left out; the first: {ungradable[0]}")
    for note in notes:
        logger.warning(note)
    logger.info("%s: %d problems, content %s", origin, len(problems), reading.content.hexdigest()[:16])
    return ProblemSet(
        dataset=dataset,
        origin=origin,
        problems=tuple(problems),
        questions=tuple(questions),
        prompt_digests=tuple(prompt_digests),
        num_rows=reading.num_rows,
        num_repeated=reading.num_repeated,
        num_conflicting=reading.num_conflicting,
        num_dropped_long=len(dropped),
        num_ungradable=len(ungradable),
        notes=tuple(notes),
        content_sha256=reading.content.hexdigest(),
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
