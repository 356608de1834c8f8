"""Reads records with their places from a file (``train.jsonl:7``, ``train.parquet, row 7``) or the hub."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import read_json_lines
from gtpo_megatron.untrusted.text import MAX_LINE_BYTES, check_file, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyarrow import RecordBatch

BATCH_ROWS = 4096
"""Rows in memory at a time."""

ENDINGS = (".jsonl", ".parquet", ".csv")
"""The files that are read."""

csv.field_size_limit(MAX_LINE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPlace:
    """The place of a data set on the Hugging Face hub.

    Attributes:
        repository: owner and name.
        revision: default commit; not a branch, because that moves.
        split: its split.
        subset: its configuration; empty if it has only one.
        files: JSON lines of the repository to read in place of its configuration.
    """

    repository: str
    revision: str
    split: str
    subset: str = ""
    files: tuple[str, ...] = ()


def read_records(path: str) -> Iterator[tuple[str, object]]:
    """Reads a file, or all files of a folder in the order of their names, row by row; places count from 1.

    Args:
        path: ends in ``.jsonl``, ``.parquet`` or ``.csv``; or a folder of such files, such as one split of a local copy
            of the hub's repository.

    Raises:
        DataError: no such file, another ending, or content that cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        files = sorted(found for found in file.iterdir() if found.suffix in ENDINGS)
        if not files:
            raise DataError(f"{printable(path)}: a folder without files that end in {', '.join(ENDINGS)}")
        return (record for found in files for record in read_records(str(found)))
    if file.suffix not in ENDINGS:
        raise DataError(f"{printable(path)}: got the ending {shown(file.suffix)}, expected .jsonl, .parquet or .csv")
    check_file(file)
    if file.suffix == ".jsonl":
        return read_json_lines(file)
    return _read_csv(file) if file.suffix == ".csv" else _read_parquet(file)


def read_hub(place: HubPlace, revision: str, *, name: str) -> Iterator[tuple[str, object]]:
    """Reads a data set of the hub, or of the local cache, row by row.

    Args:
        place: the data set.
        revision: commit to read.
        name: the user's name for it, for error messages.

    Raises:
        DataError: it cannot be read: no network and not in the cache, no such commit, ...
    """
    import datasets

    source = f"{place.repository}@{revision[:12]}"
    try:
        if place.files:
            files = [f"hf://datasets/{place.repository}@{revision}/{name}" for name in place.files]
            loaded = datasets.load_dataset("json", data_files=files, split=place.split)
        else:
            loaded = datasets.load_dataset(place.repository, place.subset or None, split=place.split, revision=revision)
        table = loaded.with_format("arrow")
        batches = table.iter(batch_size=BATCH_ROWS)
    except Exception as error:  # whatever datasets, huggingface_hub, requests or pyarrow raise
        raise DataError(
            f"{source}: cannot be read from the Hugging Face hub ({type(error).__name__}: {error}); without a network, "
            f"download it elsewhere and give the file: {name}=FILE"
        ) from error
    yield from _arrow_records((batch for table in batches for batch in table.to_batches()), source)


def _read_csv(file: Path) -> Iterator[tuple[str, object]]:
    """Rows of a file with a header line; an empty field is None."""
    name = printable(file)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            header = next(reader, None)
            if header is None:
                return
            if len(set(header)) != len(header):
                raise DataError(f"{name}: the header names a column twice: {shown(', '.join(header))}")
            for number, fields in enumerate(reader, start=1):
                if len(fields) != len(header):
                    raise DataError(
                        f"{name}, row {number}: {len(fields)} fields, expected {len(header)} as in the header"
                    )
                yield f"{name}, row {number}", {key: text or None for key, text in zip(header, fields, strict=True)}
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{name}: not a readable CSV file: {printable(error)}") from error


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
