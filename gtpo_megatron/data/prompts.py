"""Stage 1 of the path of data: a data set becomes tokenised problems."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem
from gtpo_megatron.data.chat_template import render_prompt
from gtpo_megatron.data.rows import read_rows
from gtpo_megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """The usable problems of a file, in its order.

    Attributes:
        problems: at least one; their ids are unique.
        num_dropped_long: rows left out because their prompt is too long.
    """

    problems: tuple[Problem, ...]
    num_dropped_long: int


def load_problems(
    path: str, tokenizer: "PreTrainedTokenizerBase", *, max_prompt_tokens: int, verbatim_text: bool = False
) -> ProblemSet:
    """Reads, renders and tokenises a data set.

    A row without an id is named after its data set and its number among all rows. Two rows with one id are an error: an
    id is how rollouts, evaluation and a resumed run refer to a problem, so a made-up second name would hide a
    faulty file.

    Args:
        path: ``.jsonl`` or ``.parquet``, see :mod:`gtpo_megatron.data.rows`.
        tokenizer: of the model that will read the prompts.
        max_prompt_tokens: longer prompts are dropped, counted and reported.
        verbatim_text: take text prompts as they are, without the chat template.

    Raises:
        ConfigError: ``max_prompt_tokens`` is not positive.
        DataError: no rows, a malformed row, a repeated id, or every prompt is too long.
    """
    if max_prompt_tokens < 1:
        raise ConfigError(f"max_prompt_tokens={max_prompt_tokens}: must be at least 1")
    places: dict[str, str] = {}
    problems: list[Problem] = []
    shortest_dropped = 0
    for number, row in enumerate(read_rows(path)):
        problem_id = f"{row.source}-{number}" if row.row_id is None else row.row_id
        if problem_id in places:
            raise DataError(f"{row.place}: id {problem_id!r} again, first at {places[problem_id]}; ids must be unique")
        places[problem_id] = row.place
        try:
            prompt_ids = render_prompt(tokenizer, row.prompt, verbatim_text=verbatim_text)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        if len(prompt_ids) > max_prompt_tokens:
            shortest_dropped = min(shortest_dropped or len(prompt_ids), len(prompt_ids))
            continue
        problems.append(Problem(problem_id=problem_id, prompt_ids=prompt_ids, answer=row.answer, source=row.source))
    num_dropped = len(places) - len(problems)
    if not problems:
        raise DataError(
            f"{path}: all {num_dropped} prompts are longer than max_prompt_tokens={max_prompt_tokens}; "
            f"the shortest has {shortest_dropped} tokens"
        )
    if num_dropped:
        logger.warning(
            "%s: dropped %d of %d prompts, longer than %d tokens", path, num_dropped, len(places), max_prompt_tokens
        )
    logger.info("%s: %d problems", path, len(problems))
    return ProblemSet(problems=tuple(problems), num_dropped_long=num_dropped)
