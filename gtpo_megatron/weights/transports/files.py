"""Buckets through files in a folder that ranks and workers share: slow, and everything can be looked at.

A rank's part of a bucket is one file, which appears under its name when it is whole; the worker deletes it.
"""

from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.transports.channel import SLOTS, Spans, wait_until


def _part(folder: Path, worker: int, sequence: int, rank: int) -> Path:
    return folder / f"worker_{worker}" / f"bucket_{sequence:08d}.rank_{rank}"


class FileSender:
    """A rank's end.

    Args:
        rank: of this process.
        folder: shared with the workers.
        deadline_s: longest time this end waits for a worker.
    """

    def __init__(self, rank: int, folder: Path, *, deadline_s: float) -> None:
        self._rank, self._folder, self._deadline_s = rank, folder, deadline_s
        self._sent: dict[int, list[int]] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def start(self) -> None:
        """Nothing to open."""

    def is_needed(self, worker: int, spans: Spans) -> bool:
        """Where it has a part."""
        del worker
        return self._rank in spans

    def slot(self, worker: int, sequence: int, spans: Spans) -> Tensor:
        """Memory of this process."""
        sent = self._sent.setdefault(worker, [])
        if len(sent) >= SLOTS:
            oldest = _part(self._folder, worker, sent.pop(0), self._rank)
            wait_until(
                lambda: not oldest.exists(),
                deadline_s=self._deadline_s,
                complaint=lambda: f"transport files, rank {self._rank}: worker {worker} did not read {oldest.name}",
            )
        _, num = spans[self._rank]
        if self._memory.numel() < num:
            self._memory = torch.empty(num, dtype=torch.uint8)
        sent.append(sequence)
        return self._memory[:num]

    def commit(self, worker: int, sequence: int, spans: Spans) -> None:
        """Writes the file aside and gives it its name."""
        path = _part(self._folder, worker, sequence, self._rank)
        scratch = path.with_suffix(path.suffix + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._memory[: spans[self._rank][1]].numpy().tofile(scratch)
            scratch.rename(path)
        except OSError as error:
            raise WeightSyncError(f"transport files, rank {self._rank}: {path}: {error.strerror or error}") from error

    def finish(self) -> None:
        """What was committed lies on the disk."""

    def close(self) -> None:
        """Lets go of memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class FileReceiver:
    """A worker's end."""

    def __init__(self, worker: int, folder: Path, *, deadline_s: float) -> None:
        self._worker, self._folder, self._deadline_s = worker, folder, deadline_s
        self._parts: list[Path] = []

    def wait(self, sequence: int, spans: Spans) -> Tensor:
        """Reads every rank's file."""
        bucket = torch.empty(max(first + num for first, num in spans.values()), dtype=torch.uint8)
        for rank, (first, num) in spans.items():
            bucket[first : first + num] = self._read(sequence, rank, num)
        return bucket

    def _read(self, sequence: int, rank: int, num_bytes: int) -> Tensor:
        path = _part(self._folder, self._worker, sequence, rank)
        wait_until(
            path.exists,
            deadline_s=self._deadline_s,
            complaint=lambda: (
                f"transport files, worker {self._worker}: bucket {sequence} did not come from rank {rank}"
            ),
        )
        self._parts.append(path)
        return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)

    def release(self, sequence: int) -> None:
        """Deletes the files."""
        del sequence
        for path in self._parts:
            path.unlink(missing_ok=True)
        self._parts.clear()

    def close(self) -> None:
        """Deletes what is left."""
        self.release(-1)
