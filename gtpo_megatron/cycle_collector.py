"""Python's collector of cycles, switched off for a while."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """There are no collections in the block.

    For an import of a large library, which makes objects and drops few, and which collections make up to a half slower
    (docs/performance.md); and for a fork, which stays without.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
