"""Reads records with their places from a file: ``train.jsonl:7``, ``train.parquet, row 7``."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.config.problems import ENDINGS
from gtpo_megatron.data.messages import ArrowRecord
from gtpo_megatron.data.rows import PROMPT_COLUMNS
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import parse_json, read_json, read_json_lines
from gtpo_megatron.untrusted.text import MAX_LINE_BYTES, check_file, printable, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyarrow import RecordBatch

BATCH_ROWS = 4096
"""Rows in memory at a time."""

_ROWS_INSIDE = ("data", "rows", "examples", "problems")
"""Keys of an object that holds the rows of a JSON file."""

csv.field_size_limit(MAX_LINE_BYTES)


def read_records(
    path: str, *, subset: str = "", split: str = "", usual_split: str = ""
) -> Iterator[tuple[str, object]]:
    """Reads a file, or files of a folder in the order of their names, row by row; places count from 1.

    Args:
        path: a file that ends in one of ``ENDINGS``; or a folder of such files, such as a local copy of a repository of
            the hub.
        subset: configuration of such a copy.
        split: split of a folder, as :func:`files_of` takes it.
        usual_split: likewise.

    Raises:
        DataError: no such file, another ending, content that cannot be read, or a folder whose split is not clear.
    """
    file = Path(path)
    if file.is_dir():
        files = files_of(file, subset=subset, split=split, usual_split=usual_split)
        return (record for found in files for record in read_records(str(found)))
    if file.suffix not in ENDINGS:
        raise DataError(f"{printable(path)}: got the ending {shown(file.suffix)}, expected {', '.join(ENDINGS)}")
    check_file(file)
    match file.suffix:
        case ".jsonl":
            return read_json_lines(file)
        case ".json":
            return _read_json(file)
        case ".csv":
            return _read_csv(file)
    return _read_parquet(file)


def _read_json(file: Path) -> Iterator[tuple[str, object]]:
    """Rows of a list, of the list in an object such as ``{"data": [...]}``, or of JSON lines under this ending."""
    name = printable(file)
    with file.open("rb") as lines:
        filled = (line.strip() for line in lines if line.strip())
        first, second = next(filled, b""), next(filled, b"")
    is_object = first.startswith(b"{") and first.endswith(b"}")
    if is_object and (second or _listed(parse_json(first, name)) is None):
        return read_json_lines(file)
    content = read_json(file)
    rows = content if isinstance(content, list) else _listed(content)
    if rows is None:
        rows = [content]
    return ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))


def _listed(content: object) -> list[object] | None:
    """The rows inside an object; None if it holds none, or has a prompt, so that it may be a row itself."""
    held = content if isinstance(content, dict) and not any(name in content for name in PROMPT_COLUMNS) else {}
    return next((held[key] for key in _ROWS_INSIDE if isinstance(held.get(key), list)), None)


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
        yield from arrow_records(table.iter_batches(batch_size=BATCH_ROWS), str(file))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{printable(file)}: not a readable Parquet file: {printable(error)}") from error


def arrow_records(batches: "Iterable[RecordBatch]", source: str) -> Iterator[tuple[str, object]]:
    """Rows of Arrow batches with their places, which count from 1."""
    records = (ArrowRecord(record) for batch in batches for record in batch.to_pylist())
    return ((f"{source}, row {number}", record) for number, record in enumerate(records, start=1))


_PART = re.compile(r"(?P<split>\w[\w.]*?)-\d{5}-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")

_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Names of files, and of folders below the one that is given, that are a split each."""

_NUMBERED = re.compile(rf"(?P<split>{'|'.join(sorted(_SPLITS))})(?:[-_. ]?\d+)?")
"""Names of files that are a split or one of its parts: ``train``, ``train_0``, ``test2``."""

_ABOUT = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
"""Files of ``datasets`` that hold no rows."""

_SHOWN_FILES = 6
"""Names of files in a message."""


def files_of(folder: Path, *, subset: str = "", split: str = "", usual_split: str = "") -> list[Path]:
    """The files of a data set, in the order of their names.

    Args:
        folder: folder of the files, or a copy of a repository of the hub.
        subset: configuration; its folder is taken if there is one.
        split: requested split; the names of the files must say it.
        usual_split: split that is taken if none is requested and the names of the files say their splits.

    Raises:
        DataError: there are none, they are of several splits and none is asked for, the one that is asked for is not
            among them, some say their split and others none, or parts are missing.
    """
    if subset and (folder / subset).is_dir():
        folder = folder / subset
    files, below = _direct(folder), ""
    if not files:
        folder = _folder_below(folder, split or usual_split)
        files, below = _direct(folder), folder.name
    by_split, others = _by_split(files)
    if by_split and others:
        said = [file for found in by_split.values() for file in found]
        raise DataError(
            f"{printable(folder)}: the names of {_listing(said)} say their split, those of {_listing(others)} say "
            f"none; give one of the files, or a folder in which all or none do, such as train.jsonl and test.jsonl"
        )
    if others and below in _SPLITS:
        by_split = {below: others}
    if not by_split:
        _check_one_split(folder, others, split)
        return others
    wanted = split or usual_split
    if not wanted and len(by_split) > 1:
        found = sorted(by_split)
        raise DataError(
            f"{printable(folder)}: holds the splits {', '.join(found)}; say which one: {printable(folder)}:{found[-1]}"
        )
    wanted = wanted or next(iter(by_split))
    if wanted not in by_split:
        raise DataError(f"{printable(folder)}: has no split {wanted!r}; it holds {', '.join(sorted(by_split))}")
    _check_parts(folder, wanted, by_split[wanted])
    return by_split[wanted]


def _direct(folder: Path) -> list[Path]:
    """Its files with rows; JSON only where nothing else is, since it is also what settings are written in."""
    files = sorted(one for one in folder.iterdir() if one.suffix in ENDINGS and one.name not in _ABOUT)
    return [one for one in files if one.suffix != ".json"] or files


def _folder_below(folder: Path, split: str) -> Path:
    """The folder in this one that has files with rows; of several the one that is called as the split."""
    below = sorted(one for one in folder.iterdir() if one.is_dir() and _direct(one))
    named = [one for one in below if one.name == split]
    if len(below) != 1 and not named:
        others = f"; give one of its folders: {', '.join(map(printable, below))}" if below else ""
        raise DataError(f"{printable(folder)}: a folder without files that end in {', '.join(ENDINGS)}{others}")
    return (named or below)[0]


def _by_split(files: Sequence[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """Files by the split that their names say, and those whose names say none."""
    found: dict[str, list[Path]] = defaultdict(list)
    others = []
    for file in files:
        if part := _PART.fullmatch(file.stem) or _NUMBERED.fullmatch(file.stem):
            found[part["split"]].append(file)
        else:
            others.append(file)
    return dict(found), others


def _check_one_split(folder: Path, files: Sequence[Path], split: str) -> None:
    """Raises DataError if files whose names say no split are asked for one, or have the words of several in them."""
    if split:
        raise DataError(
            f"{printable(folder)}: no file of the split {split!r}: the names of {_listing(files)} say none; leave "
            f":{split} out to read all of them, give one, or call them as their splits, such as train.jsonl and "
            f"test.jsonl"
        )
    words = {frozenset(re.split(r"[^a-z]+", file.stem.lower())) & _SPLITS for file in files} - {frozenset()}
    if len(words) > 1:
        raise DataError(
            f"{printable(folder)}: {_listing(files)} seem to be several splits; give one of them, or call them as "
            f"their splits, such as train.jsonl and test.jsonl, and say which one: {printable(folder)}:train"
        )


def _listing(files: Sequence[Path]) -> str:
    """Names of files, for a message."""
    names = sorted(printable(file.name) for file in files)
    more = [f"{len(names) - _SHOWN_FILES} more"] if len(names) > _SHOWN_FILES else []
    return ", ".join(names[:_SHOWN_FILES] + more)


def _check_parts(folder: Path, split: str, files: Sequence[Path]) -> None:
    """Raises DataError if a split of N parts has fewer files."""
    part = _PART.fullmatch(files[0].stem)
    if part is not None and len(files) != int(part["count"]):
        raise DataError(
            f"{printable(folder)}: split {split!r} has {len(files)} of its {int(part['count'])} files; get the others"
        )
