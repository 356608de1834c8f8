"""The finished runs of a study in one file of JSON lines: what they have in common, then a line a run.

The first line has configuration and provenance of the run that was written first; that of a run has only what differs
from them, by dotted name, beside its results.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.study.run_summary import FinishedRun, check_run
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.untrusted.fields import as_kind, as_record
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_bytes, printable, shown

RUNS_FILE = "runs.jsonl"
_PATIENCE_S = 60.0
"""Longest wait for another process that adds a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Common:
    """The first line."""

    config: dict[str, Any]
    provenance: dict[str, Any]


def append_run(folder: Path, run: FinishedRun) -> None:
    """Adds a line and syncs it to disk; a cut last line, of a process that was killed, is removed.

    Raises:
        DataError: the first line is damaged, or another process does not let go of the file.
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUNS_FILE
    with _only_writer(path):
        content = find_bytes(path) or b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole:
            common, lines = _common(path, whole.partition(b"\n")[0]), []
        else:
            common = _Common(config=run.config, provenance=run.provenance)
            lines = [asdict(common)]
        lines.append(_record(run, common))
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        with path.open("ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())


def read_runs(folder: Path) -> list[FinishedRun]:
    """The runs of a folder's file by arm and seed; none if there is no file.

    A cut last line is ignored. Of two lines of one run the last counts.

    Raises:
        DataError: a line before it is damaged, or the file cannot be read.
    """
    path = folder / RUNS_FILE
    lines = (find_bytes(path) or b"").split(b"\n")[:-1]
    if not lines:
        return []
    common = _common(path, lines[0])
    found = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            run = _run(line, common)
        except DataError as error:
            raise DataError(
                f"{printable(path)}:{number}: not a finished run ({error}); remove the line: a run of the study is "
                "then done again"
            ) from error
        found[run.name] = run
    return sorted(found.values(), key=lambda run: (run.arm, run.seed))


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    try:
        descriptor = held_locks.acquire(path, patience_s=_PATIENCE_S)
    except held_locks.NoLockError:
        yield  # a file system without locks
        return
    if descriptor is None:
        raise DataError(f"{printable(path)}: another process has held it for {_PATIENCE_S:.0f} s")
    try:
        yield
    finally:
        held_locks.let_go(descriptor)


def _common(path: Path, line: bytes) -> _Common:
    try:
        return as_record(_Common, parse_json(line, "its text"), "its text")
    except DataError as error:
        raise DataError(
            f"{printable(path)}:1: not what the runs below have in common ({error}); move the file elsewhere: the "
            "study's runs are then done again"
        ) from error


def _record(run: FinishedRun, common: _Common) -> dict[str, Any]:
    record = asdict(run)
    own = {name: record.pop(name) for name in asdict(common)}
    curves = record.pop("curves")
    return {**record, "changes": _changes(asdict(common), own), "curves": curves}


def _run(line: bytes, common: _Common) -> FinishedRun:
    record = as_kind(parse_json(line, "its text"), dict[str, Any], "its text")
    changed = asdict(common)
    for name, value in as_kind(record.get("changes"), dict[str, Any], "changes").items():
        *outer, last = name.split(".")
        inner: Any = changed
        for key in outer:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last not in inner:
            raise DataError(f"changes: {shown(name)} is not in the first line")
        inner[last] = value
    run = as_record(FinishedRun, {**record, **changed}, "its text")
    check_run(run)
    return run


def _changes(common: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values that differ, by dotted name; a mapping with other keys, or with dots in them, differs as a whole."""
    changes: dict[str, Any] = {}
    for key, value in own.items():
        before, name = common[key], f"{prefix}{key}"
        if json.dumps(value) == json.dumps(before):  # 1, 1.0 and true are equal in Python
            continue
        are_mappings = isinstance(value, dict) and isinstance(before, dict)
        if are_mappings and value.keys() == before.keys() and not any("." in inner for inner in value):
            changes |= _changes(before, value, f"{name}.")
        else:
            changes[name] = value
    return changes
