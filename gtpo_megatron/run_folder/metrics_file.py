"""``metrics.jsonl``: one line per step, equal byte by byte in equal runs."""

import contextlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import as_kind
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_bytes, printable

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 4 << 30
"""A million steps with 200 metrics."""

_log = logging.getLogger(__name__)


MAX_WAITING_ROWS = 10_000
"""Rows kept in memory while the file cannot be written, some tens of megabytes; the oldest are dropped first."""


class JsonlSink:
    """Writes one line per step: ``{"step": 3, ...}`` with sorted keys and exact floats.

    NaN and infinities are written as null, with a warning at the first of each metric. Every line is synced to disk. If
    that fails (such as a full disk), up to ``MAX_WAITING_ROWS`` rows are kept in memory and retried at every step and
    at the end.

    Args:
        path: the file; created if missing, otherwise appended to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._end = 0
        self._waiting: deque[bytes] = deque()
        self._num_lost = 0
        self._announced = 0
        self._warned: set[str] = set()
        self._try_to_write()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line, after waiting ones; does not raise if the disk is full."""
        line: dict[str, float | None] = {}
        for name in sorted(scalars):
            value = float(scalars[name])
            line[name] = value if math.isfinite(value) else None
            if line[name] is None and name not in self._warned:
                self._warned.add(name)
                _log.warning("step %d: %s is %s, written as null; later ones are not announced", step, name, value)
        self._waiting.append((json.dumps({"step": step, **line}, allow_nan=False) + "\n").encode("ascii"))
        if len(self._waiting) > MAX_WAITING_ROWS:
            self._waiting.popleft()
            self._num_lost += 1
        self._try_to_write()

    def close(self) -> None:
        """Tries to write waiting rows, and closes the file."""
        self._try_to_write()
        if self._waiting or self._num_lost:
            _log.error(
                "%s: the last rows of metrics could not be written, %d are lost",
                self._path,
                len(self._waiting) + self._num_lost,
            )
        if self._file is not None:
            self._file.close()
            self._file = None
        self._waiting.clear()

    def _try_to_write(self) -> None:
        try:
            self._write_waiting()
        except OSError as error:
            self._cut_back()
            if len(self._waiting) >= 2 * self._announced:  # at 1, 2, 4, ... rows
                self._announced = len(self._waiting) or 1
                _log.error(
                    "%s cannot be written (%s): %d rows of metrics wait in memory (of at most %d) and are tried again "
                    "at every step; make room",
                    self._path,
                    error.strerror,
                    len(self._waiting),
                    MAX_WAITING_ROWS,
                )

    def _write_waiting(self) -> None:
        """Writes all waiting rows or none; an incomplete end is removed."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._end = self._file.seek(0, os.SEEK_END)
        if not self._waiting:
            return
        text = memoryview(b"".join(self._waiting))
        while text:
            text = text[self._file.write(text) :]
        os.fsync(self._file.fileno())
        self._end = self._file.tell()
        if self._announced:
            _log.warning("%s is written again: %d rows that waited are in it", self._path, len(self._waiting) - 1)
            self._announced = 0
        self._waiting.clear()

    def _cut_back(self) -> None:
        """Removes an incomplete row."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # readers ignore a cut last line
                self._file.truncate(self._end)
                self._file.seek(self._end)


def truncate_after(path: Path, step: int) -> int:
    """Drops the lines of steps later than ``step``, and a last line that a crash cut short.

    Args:
        path: a ``metrics.jsonl``; a missing file is fine.
        step: the last step to keep.

    Returns:
        The number of dropped lines, including a cut one.

    Raises:
        DataError: a line before the last is not a JSON object with a step.
    """
    lines = _lines(path, is_needed=False)
    kept = [line for line, record in _rows(path, lines) if record["step"] <= step]
    if len(kept) < len(lines):
        write_file(path, b"".join(kept))
    return len(lines) - len(kept)


def check_metrics(path: Path) -> None:
    """Raises DataError where :func:`truncate_after` would, before anything is written; a missing file is fine."""
    deque(_rows(path, _lines(path, is_needed=False)), maxlen=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a ``metrics.jsonl``, also of a running or crashed run: a cut last line is ignored.

    Returns:
        One mapping per line: ``step`` (int) and floats by metric name, None if the value was not finite.

    Raises:
        DataError: no such file, or a line before the last is not a JSON object with a step.
    """
    return [record for _, record in _rows(path, _lines(path))]


def read_what_there_is(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Reads a ``metrics.jsonl`` up to the first damaged line.

    Returns:
        The rows as of :func:`read_metrics`, and a sentence about the damage, or "".

    Raises:
        DataError: no such file.
    """
    lines = _lines(path)
    rows: list[dict[str, Any]] = []
    try:
        for _, record in _rows(path, lines):
            rows.append(record)
    except DataError as error:
        return rows, f"{error}. Read up to there: {len(rows)} of {len(lines)} lines."
    if len(rows) < len(lines):
        return rows, f"{path} ends in mid-line {len(lines)} (a crash, or a line being written). Read up to there."
    return rows, ""


def _lines(path: Path, *, is_needed: bool = True) -> list[bytes]:
    content = find_bytes(path, limit=MAX_METRICS_BYTES)
    if content is None and is_needed:
        raise DataError(f"{path}: no such file; expected the metrics of a run that has finished its first step")
    return (content or b"").splitlines(keepends=True)


def _rows(path: Path, lines: Sequence[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each complete line with its content; rows share the texts of their names, or these would take most memory."""
    names: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break  # a last line without newline is incomplete
        place = f"{printable(path)}:{number}"
        try:
            record: Any = parse_json(line, place)
            if not _is_row(record):  # slow, so only used to explain an error
                record = as_kind(record, dict[str, float | None], f"{place}: the line")
                record["step"] = as_kind(record.get("step"), int, f"{place}: step")
            record = {names.setdefault(name, name): value for name, value in record.items()}
        except DataError as error:
            raise DataError(f"{error}; remove the line, or the file") from error
        yield line, record


def _is_row(record: Any) -> bool:
    """Whether this is a row: an integer step, and finite numbers or null."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    return all(value is None or (type(value) in (float, int) and math.isfinite(value)) for value in record.values())


MAX_MAGNITUDE = 1e100
"""Larger numbers count as damage, since their squares overflow."""


def finite(value: Any) -> float | None:
    """The value as a float; None if it is not a finite number (text, a list, a bool, NaN).

    Args:
        value: value that JSON or YAML gives.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_MAGNITUDE:
        return None
    return float(value)


def all_finite(values: Any) -> bool:
    """Whether this is a flat list of finite numbers, or empty."""
    if not isinstance(values, list):
        return False
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return False
    return array.ndim == 1 and array.dtype.kind in "fiu" and bool((np.abs(array) < MAX_MAGNITUDE).all())
