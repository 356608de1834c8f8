"""File locks that end with this process: forked children close their copies, which would keep the lock."""

import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.1

_descriptors: set[int] = set()


class NoLockError(OSError):
    """The file system does not support locks."""


def _close_all() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_all)


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
    _descriptors.add(descriptor)  # before locking, since a child forked now shares the open file
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
    """Closes the descriptor, which releases the lock."""
    _descriptors.discard(descriptor)
    os.close(descriptor)
