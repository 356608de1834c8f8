"""Records of a local file, JSONL or Parquet, each with its place: ``train.jsonl:7`` or ``train.parquet, row 7``."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import read_json_lines
from gtpo_megatron.untrusted.text import check_file, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyarrow import RecordBatch

BATCH_ROWS = 4096
"""Parquet rows in memory at a time."""


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


def arrow_records(batches: "Iterable[RecordBatch]", source: str) -> Iterator[tuple[str, object]]:
    """Rows of Arrow batches, as dictionaries."""
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{source}, row {number}", record


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    """Batch by batch: the published DAPO-Math-17k has 1.8 million rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        yield from arrow_records(table.iter_batches(batch_size=BATCH_ROWS), str(file))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{printable(file)}: not a readable Parquet file: {printable(error)}") from error
