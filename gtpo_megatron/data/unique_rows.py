"""Rows of a data set without repeated prompts."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from gtpo_megatron.config.dataset import DatasetRef
from gtpo_megatron.data.contamination import Questions
from gtpo_megatron.data.rows import Row
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError

logger = logging.getLogger(__name__)


def load_questions(dataset: DatasetRef) -> Questions:
    """The questions of a data set, for comparing it with another; needs no tokenizer.

    Raises:
        ConfigError, DataError: as :class:`UniqueRows`.
    """
    rows = list(UniqueRows().read(dataset))
    return Questions(ids=tuple(row_id for row_id, _ in rows), texts=tuple(row.question for _, row in rows))


@dataclass(slots=True)
class UniqueRows:
    """Reads a data set without repeats, and counts.

    Attributes:
        num_rows: read so far.
        num_repeated: of these, rows that are left out because an earlier one has the same prompt.
        num_conflicting: of these, rows whose answer is another than the first one's, which is kept.
        content: digest of ids, prompts and answers of the rows that are no repeats.
    """

    num_rows: int = 0
    num_repeated: int = 0
    num_conflicting: int = 0
    content: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _answers: dict[bytes, str] = field(default_factory=dict)  # by the prompt's hash: texts would fill memory
    _places: dict[str, str] = field(default_factory=dict)

    def read(self, dataset: DatasetRef) -> Iterator[tuple[str, Row]]:
        """Each row that is not a repeat, with its id.

        Raises:
            ConfigError, DataError: as :func:`~gtpo_megatron.data.source.read_rows`; or an id again, of another prompt.
        """
        for number, row in enumerate(read_rows(dataset)):
            self.num_rows += 1
            key = row.prompt_digest
            if key not in self._answers:
                self._answers[key] = row.answer
                problem_id = f"{row.source}-{number}" if row.row_id is None else row.row_id
                self._check_id(problem_id, row)
                self.content.update(f"{problem_id}\0{row.answer}\0".encode("utf-8", "surrogatepass") + key)
                yield problem_id, row
                continue
            self.num_repeated += 1
            if self._answers[key] != row.answer:
                self.num_conflicting += 1
                if self.num_conflicting == 1:
                    logger.warning(
                        "%s: this prompt again with the answer %r, at first it was %r; the first is taken",
                        *(row.place, row.answer, self._answers[key]),
                    )

    def _check_id(self, problem_id: str, row: Row) -> None:
        if problem_id in self._places:
            raise DataError(
                f"{row.place}: id {problem_id!r} again, first at {self._places[problem_id]}; ids must be unique"
            )
        self._places[problem_id] = row.place
