"""One process at a time converts a model into a folder that several look for."""

import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder import held_locks

logger = logging.getLogger(__name__)

HOLDER_BYTES = 512
"""Bytes read of a lock file."""


@contextmanager
def alone(target: Path, *, otherwise: str) -> Iterator[None]:
    """Locks the conversion to ``target``, waiting for other processes; the lock file beside it names the holder.

    Args:
        target: folder to make; the folder above it is created.
        otherwise: command that converts elsewhere, for messages.

    Raises:
        ConfigError: the folder above cannot be written, or its file system has no locks.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _waited_lock(target)
    except held_locks.NoLockError as error:
        raise ConfigError(
            f"{target.parent} cannot be locked: {error.strerror}; the model would be converted into it by one process "
            f"at a time: convert it elsewhere with {otherwise}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{target.parent} cannot be written: {error.strerror}; the model would be converted into it, so make it "
            f"writable, or convert elsewhere with {otherwise}"
        ) from error
    try:
        with suppress(OSError):  # a full disk: the holder's name is missing, and the conversion will report it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        held_locks.let_go(descriptor)


def _waited_lock(target: Path) -> int:
    lock = target.with_name(f".{target.name}.lock")
    if (descriptor := held_locks.acquire(lock)) is None:
        holder = lock.read_bytes()[:HOLDER_BYTES].decode(errors="replace")
        logger.warning("waiting for %s, which is making %s", holder or "another process", target)
        descriptor = held_locks.acquire(lock, patience_s=math.inf)
        assert descriptor is not None
    return descriptor
