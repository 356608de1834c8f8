"""DAPO-Math-17k (arXiv 2503.14476): training prompts with integer answers.

The published file repeats its prompts about a hundred times (1,791,700 rows); the loader removes and counts repeats.
"""

from collections.abc import Mapping
from dataclasses import replace

from gtpo_megatron.data.adapters.adapter import Adapter
from gtpo_megatron.data.hub import HubPlace
from gtpo_megatron.data.rows import Row, generic_row


def dapo_row(record: object, place: str, source: str) -> Row:
    """``prompt`` (messages) and ``reward_model.ground_truth``; the id is ``extra_info.index``.

    Raises:
        DataError: a field is missing or malformed.
    """
    row = generic_row(record, place, source)
    return row if row.row_id is not None else replace(row, row_id=_index(record))


def _index(record: object) -> str | None:
    extra = record.get("extra_info") if isinstance(record, Mapping) else None
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return None if index is None else str(index)


DAPO_MATH_17K = Adapter(
    name="dapo-math-17k",
    hub=HubPlace(
        repository="BytedTsinghua-SIA/DAPO-Math-17k",
        revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
        split="train",
    ),
    to_row=dapo_row,
    num_problems=17398,
)
