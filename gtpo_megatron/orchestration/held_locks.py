"""Locks on files that end with this process, whatever it has forked.

A lock belongs to an open file, and a forked child has the same one open: it would hold the lock after our end.
"""

import os

_descriptors: set[int] = set()


def _close_all() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_all)


def hold(descriptor: int) -> None:
    """Notes a descriptor whose lock is this process's alone."""
    _descriptors.add(descriptor)


def let_go(descriptor: int) -> None:
    """Closes it, which gives the lock back."""
    _descriptors.discard(descriptor)
    os.close(descriptor)
