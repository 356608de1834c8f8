"""Rows of a data set without repetitions."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.data.contamination import Questions
from gtpo_megatron.data.rows import Row
from gtpo_megatron.data.source import Passed, read_rows
from gtpo_megatron.errors import DataError

logger = logging.getLogger(__name__)


def load_questions(dataset: DatasetRef, *, whole_rows: bool = False) -> Questions:
    """Reads the questions of a data set, for comparing it with another.

    Args:
        dataset: the data set.
        whole_rows: an environment makes its problems, see :class:`UniqueRows`.

    Raises:
        ConfigError, DataError: as :class:`UniqueRows`.
    """
    rows = list(UniqueRows(whole_rows=whole_rows).read(dataset))
    return Questions(
        ids=tuple(row_id for row_id, _ in rows),
        texts=tuple(row.question for _, row in rows),
        details=tuple(row.details for _, row in rows) if whole_rows else (),
    )


@dataclass(slots=True)
class UniqueRows:
    """Reads a data set without repetitions, and counts them.

    A row repeats an earlier one with the same prompt. Where an environment makes the problem of all columns, such as
    the number that is to be guessed, only a row that is equal in all of them is a repetition.

    Attributes:
        whole_rows: rows with one prompt are different problems where their answers or other columns differ.
        num_rows: rows read so far.
        passed: rows of other data sets in the same files, which do not count.
        num_repeated: rows dropped because they repeat an earlier one.
        num_conflicting: repeated rows whose answer or other columns differ from the first one's, which is kept.
        content: digest of ids, prompts, answers and other columns of the rows that are not repeats.
    """

    whole_rows: bool = False
    num_rows: int = 0
    num_repeated: int = 0
    num_conflicting: int = 0
    passed: Passed = field(default_factory=Passed)
    content: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    # answer and digest of the other columns, by a row's key, to save memory
    _answers: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    _places: dict[str, str] = field(default_factory=dict)

    def read(self, dataset: DatasetRef) -> Iterator[tuple[str, Row]]:
        """Yields each row that is not a repeat, with its id.

        Raises:
            ConfigError, DataError: as :func:`~gtpo_megatron.data.source.read_rows`; or one id has two prompts.
        """
        for number, row in enumerate(read_rows(dataset, self.passed)):
            self.num_rows += 1
            key, extra = self._key(row), row.extra_digest
            if key not in self._answers:
                self._answers[key] = (row.answer, extra)
                problem_id = f"{row.source}-{number}" if row.row_id is None else row.row_id
                self._check_id(problem_id, row)
                self.content.update(f"{problem_id}\0{row.answer}\0".encode("utf-8", "surrogatepass"))
                self.content.update(row.prompt_digest + extra)
                yield problem_id, row
                continue
            self.num_repeated += 1
            first, _ = self._answers[key]
            if self._answers[key] != (row.answer, extra):
                self.num_conflicting += 1
                if self.num_conflicting == 1 and first != row.answer:
                    logger.warning(
                        "%s: this prompt again with the answer %r, at first it was %r; the first is taken",
                        *(row.place, row.answer, first),
                    )
                elif self.num_conflicting == 1:
                    logger.warning("%s: this prompt again with other columns; the first is taken", row.place)

    def _key(self, row: Row) -> bytes:
        if not self.whole_rows:
            return row.prompt_digest
        columns = f"{row.answer}\0{row.columns_json}".encode("utf-8", "surrogatepass")
        return hashlib.sha256(row.prompt_digest + columns).digest()

    def forget(self, problem_id: str, row: Row) -> None:
        """Takes back a row that was yielded last and is not used: the next one that repeats it is the first."""
        self._answers.pop(self._key(row))
        self._places.pop(problem_id)

    def _check_id(self, problem_id: str, row: Row) -> None:
        if problem_id in self._places:
            raise DataError(
                f"{row.place}: id {problem_id!r} again, first at {self._places[problem_id]}; ids must be unique"
            )
        self._places[problem_id] = row.place
