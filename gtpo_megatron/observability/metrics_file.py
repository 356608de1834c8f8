"""``metrics.jsonl``: one line a step, equal byte by byte in two equal runs, and whole again after a crash."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import as_kind
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_bytes, printable

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 4 << 30
"""A million steps with 200 metrics."""

_log = logging.getLogger(__name__)


class JsonlSink:
    """One line a step: ``{"step": 3, ...}``, keys sorted, floats with all their digits, so equal runs give equal bytes.

    JSON has no NaN: NaN and infinities are written as null, with a warning at the first of each metric. Every line is
    synchronised to the disk before the step counts as written.

    Args:
        path: the file; made if missing, else appended to.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._warned: set[str] = set()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line.

        Raises:
            OSError: the disk is full or gone.
        """
        line: dict[str, float | None] = {}
        for name in sorted(scalars):
            value = float(scalars[name])
            line[name] = value if math.isfinite(value) else None
            if line[name] is None and name not in self._warned:
                self._warned.add(name)
                _log.warning("step %d: %s is %s, written as null; later ones are not announced", step, name, value)
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def truncate_after(path: Path, step: int) -> int:
    """Drops the lines of steps later than ``step``, and a last line that a crash cut short.

    Args:
        path: a ``metrics.jsonl``; a missing file is fine.
        step: the last step to keep.

    Returns:
        How many lines were dropped, a cut one included.

    Raises:
        DataError: a line before the last is not a JSON object with a step.
    """
    lines = (find_bytes(path, limit=MAX_METRICS_BYTES) or b"").splitlines(keepends=True)
    kept = [line for line, record in _parse_lines(path, lines) if record["step"] <= step]
    if len(kept) < len(lines):
        write_file(path, b"".join(kept))
    return len(lines) - len(kept)


def check_metrics(path: Path) -> None:
    """Raises DataError where :func:`truncate_after` would, before anything is written; a missing file is fine."""
    _parse_lines(path, (find_bytes(path, limit=MAX_METRICS_BYTES) or b"").splitlines(keepends=True))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a ``metrics.jsonl``, of a running or crashed run too: a cut last line is left out.

    Returns:
        One mapping a line: ``step`` (int) and floats by metric name, None where the value was NaN or infinite.

    Raises:
        DataError: no such file, or a line before the last is not a JSON object with a step.
    """
    return [record for _, record in _parse_lines(path, _lines(path))]


def read_what_there_is(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Reads a ``metrics.jsonl`` up to its first damage, for those who would rather see a part than nothing.

    Returns:
        The rows as in :func:`read_metrics`, and a sentence on where and why they end early; empty if they do not.

    Raises:
        DataError: no such file.
    """
    lines = _lines(path)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed = _parse_lines(path, [line], first_number=number)
        except DataError as error:
            return rows, f"{error}. Read up to there: {len(rows)} of {len(lines)} lines."
        if not parsed:
            return rows, f"{path} ends in mid-line {number} (a crash, or a line being written). Read up to there."
        rows.append(parsed[0][1])
    return rows, ""


def _lines(path: Path) -> list[bytes]:
    content = find_bytes(path, limit=MAX_METRICS_BYTES)
    if content is None:
        raise DataError(f"{path}: no such file; expected the metrics of a run that has finished its first step")
    return content.splitlines(keepends=True)


def _parse_lines(path: Path, lines: Sequence[bytes], *, first_number: int = 1) -> list[tuple[bytes, dict[str, Any]]]:
    parsed: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=first_number):
        if not line.endswith(b"\n"):
            break  # only the last can lack its newline: the writer was killed, or is still writing it
        place = f"{printable(path)}:{number}"
        try:
            record: Any = parse_json(line, place)
            if not _is_row(record):  # says what is wrong with it; on a whole row it would take ten times as long
                record = as_kind(record, dict[str, float | None], f"{place}: the line")
                record["step"] = as_kind(record.get("step"), int, f"{place}: step")
        except DataError as error:
            raise DataError(f"{error}; remove the line, or the file") from error
        parsed.append((line, record))
    return parsed


def _is_row(record: Any) -> bool:
    """Whether this is what the sink writes: an integer step, and finite numbers or null."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    return all(value is None or (type(value) in (float, int) and math.isfinite(value)) for value in record.values())
