"""Imports of large libraries without Python's collector of cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Imports in the block are not interrupted by collections.

    An import makes objects and drops few. The collector looks at them again and again while there are more, which is a
    fifth to a third of vLLM's import (docs/performance.md).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
