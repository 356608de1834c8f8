"""The lock of a run folder, which excludes a second driver, and the record of its driver for ``status``."""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.json_text import find_json
from gtpo_megatron.untrusted.text import printable, reason

_log = logging.getLogger(__name__)

FINISHED = "finished"
"""The outcome of a run that completed its last step."""

LOCK_FILE = ".lock"
STATE_FILE = "run_state.json"

OUTCOME_CHARACTERS = 500
"""Longest outcome."""

LOCK_PATIENCE_S = 2.0
"""Longest wait for the lock: it may be released late on a network file system, and ``status`` holds it briefly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The record of a driver.

    Attributes:
        num_starts: number of drivers that have opened this folder, including this one.
        host: host of the last one.
        pid: process id of the last one on that host.
        started_at: Unix time.
        ended_at: Unix time; 0 while it runs, or if it was killed.
        outcome: outcome in a line; empty if ``ended_at`` is 0.
    """

    num_starts: int
    host: str
    pid: int
    started_at: float
    ended_at: float = 0.0
    outcome: str = ""


def acquire(folder: Path) -> int | None:
    """Locks the folder, see :func:`held_locks.acquire`; None if another process holds it."""
    return held_locks.acquire(folder / LOCK_FILE, patience_s=LOCK_PATIENCE_S)


def is_held(folder: Path) -> bool:
    """Whether a driver holds the lock, on this node or on another that shares the file system's locks.

    Raises:
        DataError: the lock cannot be read.
    """
    lock = folder / LOCK_FILE
    try:
        return held_locks.is_held(lock)
    except OSError as error:
        raise DataError(
            f"{printable(lock)}: cannot be read: {reason(error)}; whether the run goes on is not known"
        ) from error


def read_state(folder: Path) -> RunState | None:
    """The last driver's record; None if there is none.

    Raises:
        DataError: it cannot be read.
    """
    found = find_json(folder / STATE_FILE)
    return None if found is None else as_record(RunState, found, printable(folder / STATE_FILE))


def _known_state(folder: Path) -> RunState | None:
    """The previous record; None if it is missing or damaged."""
    try:
        return read_state(folder)
    except DataError as error:
        _log.warning("%s; the starts before this one are not counted", error)
        return None


def record_start(folder: Path) -> RunState:
    """Records this process as the run's driver; call it with the lock held."""
    before = _known_state(folder)
    state = RunState(
        num_starts=1 + (before.num_starts if before else 0),
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=time.time(),
    )
    _write(folder, state)
    return state


def record_end(folder: Path, outcome: str) -> None:
    """Records how this process ended, without raising: on a full disk the record stays that of the start."""
    state = _known_state(folder)
    if state is None:
        return
    state = replace(state, ended_at=time.time(), outcome=outcome[:OUTCOME_CHARACTERS])
    try:
        _write(folder, state)
    except OSError as error:
        _log.warning("how the run ended could not be written into %s: %s", folder, error.strerror)


@dataclass(slots=True)
class Ending:
    """The outcome of a block, set by the driver.

    Attributes:
        outcome: a short description.
    """

    outcome: str = ""


@contextmanager
def recorded_end(folder: Path) -> Iterator[Ending]:
    """Records how the block ended: its outcome, or its error."""
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        record_end(folder, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    record_end(folder, ending.outcome)


def _write(folder: Path, state: RunState) -> None:
    write_file(folder / STATE_FILE, json.dumps(asdict(state), indent=1) + "\n")
