"""Benchmarks whose rows are a question and an answer under names of their own."""

from collections.abc import Callable

from gtpo_megatron.data.adapters.adapter import Adapter
from gtpo_megatron.data.fields import answer_text, as_record, optional_text, text_field
from gtpo_megatron.data.hub import HubPlace
from gtpo_megatron.data.rows import Row


def column_reader(questions: tuple[str, ...], *, id_column: str = "") -> Callable[[object, str, str], Row]:
    """Reads the first of the question columns that is there, and ``answer``; ids are prefixed by the data set."""

    def to_row(record: object, place: str, source: str) -> Row:
        fields = as_record(record, place, f"{' or '.join(questions)}, and answer")
        row_id = optional_text(fields, id_column)
        return Row(
            place=place,
            prompt=text_field(fields, questions, place),
            answer=answer_text(fields.get("answer"), place, "answer"),
            row_id=None if row_id is None else f"{source}-{row_id}",
            source=source,
            is_bare=True,
        )

    return to_row


QUESTION = ("problem", "question")
"""Mirrors of one benchmark use either."""

AIME24 = Adapter(
    name="aime24",
    hub=HubPlace(
        repository="HuggingFaceH4/aime_2024", revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a", split="train"
    ),
    to_row=column_reader(QUESTION, id_column="id"),
    num_problems=30,
)
AIME25 = Adapter(
    name="aime25",
    hub=HubPlace(repository="math-ai/aime25", revision="563bb8404243c5f09de6ec262f2db674fe5bce9b", split="test"),
    to_row=column_reader(QUESTION, id_column="id"),
    num_problems=30,
)
MATH500 = Adapter(
    name="math500",
    hub=HubPlace(
        repository="HuggingFaceH4/MATH-500", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", split="test"
    ),
    to_row=column_reader(QUESTION, id_column="unique_id"),
    num_problems=500,
)
AMC23 = Adapter(
    name="amc23",
    hub=HubPlace(repository="math-ai/amc23", revision="80815d37005feb82cd7f8fbc6901d5d3eff43057", split="test"),
    to_row=column_reader(QUESTION, id_column="id"),
    num_problems=40,
)
MINERVA = Adapter(
    name="minerva",
    hub=HubPlace(repository="math-ai/minervamath", revision="ee46ddc498933b1977577953250ca5c66be64f96", split="test"),
    to_row=column_reader(QUESTION),
    num_problems=272,
)
