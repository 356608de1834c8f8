"""Stage 1 of the path of data: a data set becomes tokenised problems."""

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.dataset import DatasetRef, parse_dataset
from gtpo_megatron.config.prompt import BOXED_TEMPLATE, fill_template
from gtpo_megatron.data.adapters import ADAPTERS
from gtpo_megatron.data.chat_template import render_prompt
from gtpo_megatron.data.contamination import Questions
from gtpo_megatron.data.source import origin_of
from gtpo_megatron.data.unique_rows import UniqueRows
from gtpo_megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """The usable problems of a data set, in its order.

    Attributes:
        dataset: what was asked for.
        origin: the file, or the hub's repository and commit.
        problems: at least one; their ids are unique.
        questions: of each problem, without instructions; for comparing data sets.
        prompt_digests: of each problem's prompt, as its row has it.
        num_rows: rows that were read.
        num_repeated: rows left out because an earlier one has the same prompt.
        num_conflicting: of these, rows whose answer is another than the first one's, which is kept.
        num_dropped_long: problems left out because their prompt is too long.
        notes: sentences for a person on what was left out.
        content_sha256: of ids, prompts and answers of all rows that are no repeats; tells versions apart.
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
    notes: tuple[str, ...]
    content_sha256: str

    @property
    def used_sha256(self) -> str:
        """Of the prompts, as the rows have them, and answers of the problems, in their order.

        The same for every tokenizer and template, wherever the rows lie and whatever they are called.
        """
        digest = hashlib.sha256()
        for problem, prompt_digest in zip(self.problems, self.prompt_digests, strict=True):
            digest.update(f"{problem.answer}\0".encode("utf-8", "surrogatepass") + prompt_digest)
        return digest.hexdigest()

    @property
    def comparable(self) -> Questions:
        """For :func:`~gtpo_megatron.data.contamination.find_contamination`."""
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
) -> ProblemSet:
    """Reads, renders and tokenises a data set.

    Of rows with one prompt the first is taken and the others are counted: the published DAPO-Math-17k has every prompt
    about a hundred times. A row without an id is named after its data set and its number among all rows. Two different
    prompts with one id are an error: an id is how rollouts, evaluation and a resumed run refer to a problem, so a
    made-up second name would hide a faulty file.

    Args:
        dataset: a file, or a known data set, see :mod:`gtpo_megatron.config.dataset`.
        tokenizer: of the model that will read the prompts.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        verbatim_text: take text prompts as they are, without the chat template.
        template: put around bare questions; ``{problem}`` stands for the question.

    Raises:
        ConfigError: ``max_prompt_tokens`` is not positive, or the data set's name is unknown.
        DataError: no rows, a malformed row, a repeated id, or every prompt is too long.
    """
    if max_prompt_tokens < 1:
        raise ConfigError(f"max_prompt_tokens={max_prompt_tokens}: must be at least 1")
    dataset = parse_dataset(dataset, "data set") if isinstance(dataset, str) else dataset
    origin = origin_of(dataset)
    reading = UniqueRows()
    problems: list[Problem] = []
    questions: list[str] = []
    prompt_digests: list[bytes] = []
    dropped: list[int] = []
    for problem_id, row in reading.read(dataset):
        prompt = fill_template(template, row.question) if row.is_bare else row.prompt
        try:
            prompt_ids = render_prompt(tokenizer, prompt, verbatim_text=verbatim_text)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        if len(prompt_ids) > max_prompt_tokens:
            dropped.append(len(prompt_ids))
            continue
        problems.append(Problem(problem_id=problem_id, prompt_ids=prompt_ids, answer=row.answer, source=row.source))
        questions.append(row.question)
        prompt_digests.append(row.prompt_digest)
    if not problems:
        raise DataError(
            f"{origin}: all {len(dropped)} prompts are longer than max_prompt_tokens={max_prompt_tokens}; "
            f"the shortest has {min(dropped)} tokens"
        )
    notes = _notes(dataset, origin, reading, len(dropped), max_prompt_tokens)
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
        notes=tuple(notes),
        content_sha256=reading.content.hexdigest(),
    )


def _notes(
    dataset: DatasetRef, origin: str, reading: UniqueRows, num_dropped: int, max_prompt_tokens: int
) -> list[str]:
    """What a person should know about the data set."""
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
    if adapter and num_unique != adapter.num_problems:
        notes.append(
            f"{origin}: {num_unique} different problems; {adapter.name} is known to have {adapter.num_problems}"
        )
    return notes
