"""Who has a run folder: the lock that keeps a second driver out, and a record of starts and ends for ``status``."""

import errno
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
"""The outcome of a run that came to its last step."""

LOCK_FILE = ".lock"
STATE_FILE = "run_state.json"

RECORD_BYTES = 8192
"""Of the record: blanks fill it up."""
OUTCOME_CHARACTERS = 500
"""Of an outcome; twelve bytes each at most."""

LOCK_PATIENCE_S = 2.0
"""Longest wait for the lock: a network file system may see the end of the last holder late, and ``status`` looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a driver writes down about itself.

    Attributes:
        num_starts: drivers that have opened this folder, this one included.
        host: where the last one runs or ran.
        pid: of it, on that host.
        started_at: Unix time.
        ended_at: Unix time; 0 while it runs, or if it was killed before it could say anything.
        outcome: how it ended, in words; empty like ``ended_at``.
    """

    num_starts: int
    host: str
    pid: int
    started_at: float
    ended_at: float = 0.0
    outcome: str = ""


def acquire(folder: Path) -> int | None:
    """Locks the folder, see :func:`held_locks.acquire`; None where another process has it."""
    return held_locks.acquire(folder / LOCK_FILE, patience_s=LOCK_PATIENCE_S)


def is_held(folder: Path) -> bool:
    """Whether a driver has the folder open now, on this node or on another that shares the file system's locks.

    Raises:
        DataError: that cannot be told, because the lock cannot be read.
    """
    lock = folder / LOCK_FILE
    try:
        return held_locks.is_held(lock)
    except OSError as error:
        raise DataError(
            f"{printable(lock)}: cannot be read: {reason(error)}; whether the run goes on is not known"
        ) from error


def read_state(folder: Path) -> RunState | None:
    """The last driver's record; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    found = find_json(folder / STATE_FILE)
    return None if found is None else as_record(RunState, found, printable(folder / STATE_FILE))


def _known_state(folder: Path) -> RunState | None:
    """The record that a new one goes on from; a damaged one is no reason not to run."""
    try:
        return read_state(folder)
    except DataError as error:
        _log.warning("%s; the starts before this one are not counted", error)
        return None


def record_start(folder: Path) -> RunState:
    """Writes down that this process drives the run from now on; call it with the lock held."""
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
    """Writes down how this process ended, as well as it can: whoever ends has something better to say than an error.

    Where the disk is full the record is written over the one of the start, which has taken its place already.
    """
    state = _known_state(folder)
    if state is None:
        return
    state = replace(state, ended_at=time.time(), outcome=outcome[:OUTCOME_CHARACTERS])
    try:
        _write(folder, state)
    except OSError as error:
        try:
            _write_over(folder / STATE_FILE, _text(state))
        except OSError:
            _log.warning("how the run ended could not be written into %s: %s", folder, error.strerror)


@dataclass(slots=True)
class Ending:
    """Filled in by the driver as soon as it knows.

    Attributes:
        outcome: in words.
    """

    outcome: str = ""


@contextmanager
def recorded_end(folder: Path) -> Iterator[Ending]:
    """Writes down how the block ended: what it says of itself, or the error that it ended by."""
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        record_end(folder, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    record_end(folder, ending.outcome)


def _write(folder: Path, state: RunState) -> None:
    write_file(folder / STATE_FILE, _text(state))


def _write_over(path: Path, text: str) -> None:
    """In place, without a byte more than there is."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        if len(text) > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(descriptor, text.encode("ascii"), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(state: RunState) -> str:
    """The record, always of one length: its end fits where its start was."""
    return json.dumps(asdict(state), indent=1).ljust(RECORD_BYTES - 1) + "\n"
