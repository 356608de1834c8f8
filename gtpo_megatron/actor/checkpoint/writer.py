"""Writes what Megatron has planned to write in a forked process, so that training goes on meanwhile.

The child sees the tensors as they were when it was forked. It reports through a pipe: the places of what it wrote,
which Megatron's metadata needs, and a checksum per file. Megatron's own caller does the same with a queue between
processes for which it starts an interpreter, seconds and 200 MiB per rank.

A child does not outlive its rank: its snapshot is the rank's memory, and its open sockets would look like a rank that
still lives.
"""

import contextlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from gtpo_megatron.cycle_collector import without_collections
from gtpo_megatron.weights.megatron.checkpoint_files import file_checksum

BACKGROUND_NICENESS = 10
"""Of a writer that training shares the cores with."""

ORPHAN_CHECK_S = 0.5
"""Between two looks of a writer whether its rank is still there."""


def results_queue() -> "queue.Queue[Any]":
    """The queue that Megatron's writer hands its results over in, of this process; made if there is none yet.

    Megatron would make one between processes here. Ours are put in by :meth:`ForkedWrite.wait`, in this process.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    found: queue.Queue[Any] = filesystem_async._results_queue
    return found


class ForkedWrite:
    """This rank's files of one checkpoint on their way to the disk.

    Args:
        request: Megatron's ``AsyncRequest``; tensors are copied to the host here, if they are not there.
        folder: folder of the checkpoint.
        in_background: the caller goes on training, so the writer steps back.
    """

    def __init__(self, request: Any, folder: Path, *, in_background: bool) -> None:
        self._request = request
        self._process: Any = None
        self._buckets: Any = None
        if request.async_fn is None:  # a replica has nothing to write
            return
        rank, buckets, _ = request.async_fn_args
        if request.preload_fn is not None:
            buckets = request.preload_fn()
        # until it is written: what was copied from a GPU is page-locked memory, which a fork shares, and torch would
        # give it to the next copy of this size
        self._buckets = buckets
        context = multiprocessing.get_context("fork")
        self._results, child_end = context.Pipe(duplex=False)
        # not daemonic: a rank that ends in good order waits for it
        self._process = context.Process(
            target=self._write,
            args=(rank, buckets, folder, child_end, in_background, os.getpid()),
            name=f"checkpoint {folder.name}",
        )
        # in a child a collection would free CUDA tensors that are the parent's
        with without_collections():
            self._process.start()
        child_end.close()  # so that a child that died reads as the end of the pipe

    def is_done(self) -> bool:
        """Written, or failed; ``wait`` will not wait."""
        return self._process is None or bool(self._results.poll(0))

    def wait(self) -> tuple[dict[str, str], str]:
        """Waits for the child.

        Returns:
            Checksum by file name, and what went wrong, or an empty text.
        """
        if self._process is None:
            return {}, ""
        # a child that has told its results is not waited for: giving its memory back takes a while, and the start of
        # the next one collects it
        try:
            written, checksums, error = self._results.recv()
        except (EOFError, OSError):
            self._process.join()
            written, checksums, error = None, {}, f"its writer died (exit code {self._process.exitcode})"
        self._buckets = None
        self._results.close()
        if not error:
            results_queue().put(written)
        return checksums, error

    def abandon(self) -> None:
        """Ends a write that nobody will wait for."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._buckets = None
            self._results.close()

    def finish(self) -> None:
        """Writes the index of all files; on all ranks, after ``wait`` went well on all of them.

        Collectives: Megatron's over the world.
        """
        for finalize in self._request.finalize_fns:
            finalize()

    def _write(
        self, rank: int, buckets: Sequence[Any], folder: Path, child_end: Any, in_background: bool, parent: int
    ) -> None:
        """The child: never returns into the parent's code."""
        os.setpgid(0, 0)  # a signal to the driver's group is not for this child; nice needs the session
        self._results.close()  # while this end is open anywhere, nobody hears that the rank is gone
        if in_background:
            with contextlib.suppress(OSError):  # where the system forbids it, the writer competes
                os.nice(BACKGROUND_NICENESS)
        outcome: tuple[Any, dict[str, str], str]
        try:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            written = _write_files(self._request.async_fn.args[0], buckets)
            mine = sorted(folder.glob(f"__{rank}_*"))
            outcome = (written, {path.name: file_checksum(path) for path in mine}, "")
        except Exception as error:  # noqa: BLE001 - carried to the parent, which reports it on all ranks
            outcome = (None, {}, f"{type(error).__name__}: {error}")
        with contextlib.suppress(BrokenPipeError):  # the rank was killed: nobody listens, and nobody will use the files
            child_end.send(outcome)
        child_end.close()


def _write_files(transforms: Any, buckets: Sequence[Any]) -> dict[int, Any]:
    """Megatron's writing of files, one after the other in this process.

    Megatron 0.16 would fork once more for each, and wait for ever for one that is killed.

    Returns:
        By number of the file, where in it everything lies.

    Raises:
        Exception: what went wrong with a file.
    """
    outcomes: queue.Queue[Any] = queue.Queue()
    under_way: queue.Queue[int] = queue.Queue()
    written = {}
    for number, bucket in enumerate(buckets):
        under_way.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcomes, under_way, True)
        _, found = outcomes.get_nowait()
        if isinstance(found, Exception):
            raise found
        written[number] = found
    return written


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, however that ended."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)
