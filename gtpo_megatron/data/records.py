"""Records of a data set, each with its place: of a file (``train.jsonl:7``, ``train.parquet, row 7``) or of the hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import read_json_lines
from gtpo_megatron.untrusted.text import check_file, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyarrow import RecordBatch

BATCH_ROWS = 4096
"""Rows in memory at a time: the published DAPO-Math-17k has 1.8 million."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPlace:
    """Where a data set is.

    Attributes:
        repository: owner and name.
        revision: commit that is read unless another is asked for; a branch would move.
        split: of the data set.
        subset: its configuration; empty where it has one only.
    """

    repository: str
    revision: str
    split: str
    subset: str = ""


def read_records(path: str) -> Iterator[tuple[str, object]]:
    """Reads a file row by row; places count from 1.

    Args:
        path: ends in ``.jsonl`` or ``.parquet``.

    Raises:
        DataError: no such file, another ending, or content that cannot be read.
    """
    file = Path(path)
    if file.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{printable(path)}: got the ending {shown(file.suffix)}, expected .jsonl or .parquet")
    check_file(file)
    if file.suffix == ".jsonl":
        return read_json_lines(file)
    return _read_parquet(file)


def read_hub(place: HubPlace, revision: str, *, name: str) -> Iterator[tuple[str, object]]:
    """Downloads (or takes from the local cache) and reads row by row.

    Args:
        place: of the data set.
        revision: commit to read.
        name: what the user calls it, for the error message.

    Raises:
        DataError: it cannot be had: no network and not in the cache, no such commit, ...
    """
    import datasets

    source = f"{place.repository}@{revision[:12]}"
    try:
        table = datasets.load_dataset(
            place.repository, place.subset or None, split=place.split, revision=revision
        ).with_format("arrow")
        batches = table.iter(batch_size=BATCH_ROWS)
    except Exception as error:  # whatever datasets, huggingface_hub, requests or pyarrow raise
        raise DataError(
            f"{source}: cannot be read from the Hugging Face hub ({type(error).__name__}: {error}); without a network, "
            f"download it elsewhere and give the file: {name}=FILE"
        ) from error
    yield from _arrow_records((batch for table in batches for batch in table.to_batches()), source)


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        yield from _arrow_records(table.iter_batches(batch_size=BATCH_ROWS), str(file))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{printable(file)}: not a readable Parquet file: {printable(error)}") from error


def _arrow_records(batches: "Iterable[RecordBatch]", source: str) -> Iterator[tuple[str, object]]:
    records = (record for batch in batches for record in batch.to_pylist())
    return ((f"{source}, row {number}", record) for number, record in enumerate(records, start=1))
