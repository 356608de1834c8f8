"""The data sets that are known by name: where each is published, and how its records become rows."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gtpo_megatron.data.records import HubPlace
from gtpo_megatron.data.rows import Record, Row, answer_text, generic_row, optional_text, shown_or_missing, text_field
from gtpo_megatron.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One known data set.

    Attributes:
        name: lower case; what users write.
        hub: where it is published.
        to_row: ``(record, place, source)`` to a checked row; ``source`` is the name of the data set.
        num_problems: different problems that the pinned revision has; another number is reported.
    """

    name: str
    hub: HubPlace
    to_row: Callable[[Record, str, str], Row]
    num_problems: int


def dapo_row(record: Record, place: str, source: str) -> Row:
    """DAPO-Math-17k (arXiv 2503.14476): ``prompt`` (messages), ``reward_model.ground_truth``, ``extra_info.index``.

    The published file repeats its prompts about a hundred times (1,791,700 rows); repeats are left out when it is read.
    """
    row = generic_row(record, place, source)
    extra = record.get("extra_info")
    if row.row_id is not None or not isinstance(extra, Mapping):
        return row
    return replace(row, row_id=optional_text(extra, "index"))


def question_reader(
    *questions: str, id_column: str = "", answer: Callable[[Record, str], str] | None = None
) -> Callable[[Record, str, str], Row]:
    """Reads benchmarks whose rows are a question and an answer under names of their own.

    Args:
        questions: columns; the first that is there counts.
        id_column: ids are prefixed by the data set; empty where it has none.
        answer: ``(record, place)`` to the reference answer; None reads the column ``answer``.
    """

    def to_row(record: Record, place: str, source: str) -> Row:
        row_id = optional_text(record, id_column)
        return Row(
            place=place,
            prompt=text_field(record, questions, place),
            answer=answer(record, place) if answer else answer_text(record.get("answer"), place, "answer"),
            row_id=None if row_id is None else f"{source}-{row_id}",
            source=source,
            is_bare=True,
        )

    return to_row


def olympiad_answer(record: Record, place: str) -> str:
    """The parts of ``final_answer`` in one line without dollars: a reference is parsed as one piece of mathematics."""
    final = record.get("final_answer")
    parts = [final] if isinstance(final, str) else final
    if not isinstance(parts, list | tuple) or not parts:
        raise DataError(f"{place}: final_answer is {shown_or_missing(final)}; expected a list of at least one text")
    return ", ".join(answer_text(part, place, "final_answer").replace("$", "").strip(" .") for part in parts)


_QUESTION = ("problem", "question")
"""Mirrors of one benchmark use either."""

ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            name="dapo-math-17k",
            hub=HubPlace(
                repository="BytedTsinghua-SIA/DAPO-Math-17k",
                revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
                split="train",
            ),
            to_row=dapo_row,
            num_problems=17398,
        ),
        Adapter(
            name="aime24",
            hub=HubPlace(
                repository="HuggingFaceH4/aime_2024", revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a", split="train"
            ),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=30,
        ),
        Adapter(
            name="aime25",
            hub=HubPlace(
                repository="math-ai/aime25", revision="563bb8404243c5f09de6ec262f2db674fe5bce9b", split="test"
            ),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=30,
        ),
        Adapter(
            name="math500",
            hub=HubPlace(
                repository="HuggingFaceH4/MATH-500", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", split="test"
            ),
            to_row=question_reader(*_QUESTION, id_column="unique_id"),
            num_problems=500,
        ),
        Adapter(
            name="amc23",
            hub=HubPlace(repository="math-ai/amc23", revision="80815d37005feb82cd7f8fbc6901d5d3eff43057", split="test"),
            to_row=question_reader(*_QUESTION, id_column="id"),
            num_problems=40,
        ),
        Adapter(
            name="minerva",
            hub=HubPlace(
                repository="math-ai/minervamath", revision="ee46ddc498933b1977577953250ca5c66be64f96", split="test"
            ),
            to_row=question_reader(*_QUESTION),
            num_problems=272,
        ),
        Adapter(  # arXiv 2402.14008, the open-ended English text-only problems; ``unit``, ``error`` are the grader's
            name="olympiadbench",
            hub=HubPlace(
                repository="Hothan/OlympiadBench",
                revision="91184b52131e7fc9455fef848035173aea8cc01a",
                split="train",
                subset="OE_TO_maths_en_COMP",
            ),
            to_row=question_reader("question", id_column="id", answer=olympiad_answer),
            num_problems=674,
        ),
    )
}
"""By name; a new one is an entry here."""


def adapter_of(name: str) -> Adapter:
    """The adapter of a known data set.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ADAPTERS:
        close = difflib.get_close_matches(name, ADAPTERS, n=1)
        raise ConfigError(
            f"unknown data set {name!r}{f'; perhaps you meant {close[0]!r}' if close else ''}; known: "
            f"{', '.join(ADAPTERS)}; or give a file: {name}=FILE.jsonl"
        )
    return ADAPTERS[name]
