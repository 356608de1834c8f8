"""File locks that end with this process, or with the last fork of it that lives longer."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.1


class NoLockError(OSError):
    """The file system does not support locks."""


def acquire(path: Path, *, patience_s: float = 0.0) -> int | None:
    """Locks a file, which is created if needed, until :func:`let_go` or the end of this process.

    Args:
        path: the file.
        patience_s: longest wait for another process to release it.

    Returns:
        The descriptor; None if another process holds the lock.

    Raises:
        NoLockError: the file system has no locks.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                let_go(descriptor)
                return None
            time.sleep(_POLL_S)
        except OSError as error:
            let_go(descriptor)
            raise NoLockError(*error.args) from error
        else:
            return descriptor


def is_held(path: Path) -> bool:
    """Whether a process holds the lock, on this node or on another that shares the file system's locks.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)  # releases the shared lock
    return False


def let_go(descriptor: int) -> None:
    """Releases the lock, also of forks that share the open file."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
