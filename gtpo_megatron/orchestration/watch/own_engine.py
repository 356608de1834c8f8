"""Cleans up after an engine in this process: shared memory and temporary files of vLLM and its workers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from gtpo_megatron.orchestration.watch.run_watch import RunWatch


@contextmanager
def swept_process() -> Iterator[None]:
    """A temporary folder for the block; it and shared memory are removed when the block or the process ends."""
    watch = RunWatch(None, sweeps_driver=True)
    before = tempfile.gettempdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(watch.temp_folder)
    try:
        yield
    finally:
        tempfile.tempdir = os.environ["TMPDIR"] = before
        watch.closing()
        watch.end()
