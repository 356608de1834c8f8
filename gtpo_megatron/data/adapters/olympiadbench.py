"""OlympiadBench (arXiv 2402.14008), the open-ended English text-only competition problems in mathematics."""

from gtpo_megatron.data.adapters.adapter import Adapter
from gtpo_megatron.data.fields import answer_text, as_record, optional_text, shown, text_field
from gtpo_megatron.data.hub import HubPlace
from gtpo_megatron.data.rows import Row
from gtpo_megatron.errors import DataError


def olympiadbench_row(record: object, place: str, source: str) -> Row:
    """``question`` and ``final_answer``, a list of text; the columns ``unit`` and ``error`` are left to the grader.

    Raises:
        DataError: a field is missing, or the list is empty.
    """
    fields = as_record(record, place, "question and final_answer")
    row_id = optional_text(fields, "id")
    return Row(
        place=place,
        prompt=text_field(fields, ("question",), place),
        answer=_answer(fields.get("final_answer"), place),
        row_id=None if row_id is None else f"{source}-{row_id}",
        source=source,
        is_bare=True,
    )


def _answer(final: object, place: str) -> str:
    """The parts of the answer in one line without dollars: a reference is parsed as one piece of mathematics."""
    parts = [final] if isinstance(final, str) else final
    if not isinstance(parts, list | tuple) or not parts:
        raise DataError(f"{place}: final_answer is {shown(final)}; expected a list of at least one text")
    return ", ".join(answer_text(part, place, "final_answer").replace("$", "").strip(" .") for part in parts)


OLYMPIADBENCH = Adapter(
    name="olympiadbench",
    hub=HubPlace(
        repository="Hothan/OlympiadBench",
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        split="train",
        subset="OE_TO_maths_en_COMP",
    ),
    to_row=olympiadbench_row,
    num_problems=674,
)
