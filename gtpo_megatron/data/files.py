"""Records of a local file, JSONL or Parquet, each with its place: ``train.jsonl:7`` or ``train.parquet, row 7``."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.errors import DataError

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
    if not file.is_file():
        raise DataError(f"{path}: no such file; give the path of a .jsonl or .parquet file")
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".parquet":
        return _read_parquet(file)
    raise DataError(f"{path}: got the ending {file.suffix!r}, expected .jsonl or .parquet")


def arrow_records(batches: "Iterable[RecordBatch]", source: str) -> Iterator[tuple[str, object]]:
    """Rows of Arrow batches, as dictionaries."""
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{source}, row {number}", record


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    """One JSON value a line; line by line, because only so a broken one can be named. Blank lines are passed over."""
    with file.open("rb") as lines:  # bytes: a text file decodes ahead, and would blame an earlier line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file}:{number}"
                try:
                    record = json.loads(line.decode("utf-8"))
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise DataError(f"{place}: not a JSON object: {error}; fix or remove the line") from error
                yield place, record


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    """Batch by batch: the published DAPO-Math-17k has 1.8 million rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        yield from arrow_records(table.iter_batches(batch_size=BATCH_ROWS), str(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error
