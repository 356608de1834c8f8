"""For an engine in this very process: what vLLM and its workers leave in memory and on disk goes with it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from gtpo_megatron.orchestration.watch.run_watch import RunWatch


@contextmanager
def swept_process() -> Iterator[None]:
    """A temporary folder of its own for the block; what it holds, and shared memory, goes when block or process end."""
    watch = RunWatch(None, sweeps_driver=True)
    before = tempfile.gettempdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(watch.temp_folder)
    try:
        yield
    finally:
        tempfile.tempdir = os.environ["TMPDIR"] = before
        watch.closing()
        watch.end()
