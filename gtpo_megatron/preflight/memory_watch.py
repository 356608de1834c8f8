"""Peaks of memory by phase of a step: of every GPU as nvidia-smi sees it, or of the process tree where there is none.

What nvidia-smi counts is everything on a device: contexts, communicators and other processes too, which no process
knows of itself. One ``nvidia-smi`` a node prints it every tenth of a second.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gtpo_megatron.observability.memory import PeakMemory

SMI = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits", "-lms", "100")

MIB = 1 << 20

_watchers: dict[str, "_SmiStream"] = {}
"""In a process of the run: its stream, between ``start_smi`` and ``stop_smi``."""


class _SmiStream:
    """Reads nvidia-smi in a thread and keeps the largest numbers of every phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.peaks: dict[tuple[str, str], int] = {}
        self.process = subprocess.Popen(SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, name="nvidia-smi", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            uuid, _, used = (part.strip() for part in line.partition(","))
            if used.isdigit():
                key = (self.phase, uuid)
                self.peaks[key] = max(self.peaks.get(key, 0), int(used) * MIB)


def start_smi(_held: object) -> None:
    """A question to one process of each node: starts its stream."""
    if "smi" not in _watchers:
        _watchers["smi"] = _SmiStream()


def set_phase(_held: object, phase: str) -> None:
    """A question to the same processes: what is read from now on counts for this phase; empty: for none."""
    _watchers["smi"].phase = phase


def stop_smi(_held: object) -> dict[tuple[str, str], int]:
    """A question to the same processes: ends the stream; returns bytes by phase and device."""
    stream = _watchers.pop("smi")
    stream.process.terminate()
    stream.process.wait()
    return stream.peaks


class MemoryWatch:
    """Peaks by phase.

    Phases do not nest. On GPUs the phases of a step are told to every node; on a machine without GPUs the peak of this
    process and all that it has started is read, which are all of the run.
    """

    def __init__(self) -> None:
        self._phase = ""
        self._tell: Callable[[str], object] | None = None
        self._host: PeakMemory | None = None

    def watch_host(self) -> None:
        """Begins to read the memory of this machine's processes."""
        self._host = PeakMemory(stage=lambda: self._phase)
        self._host.__enter__()

    def watch_devices(self, tell: Callable[[str], object]) -> None:
        """Begins to tell nodes the phases.

        Args:
            tell: tells all nodes, and returns when they know.
        """
        self._tell = tell

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is used within the block counts for this phase."""
        self._set(name)
        try:
            yield
        finally:
            self._set("")

    def take_host(self) -> Mapping[str, float]:
        """Ends the reading of this machine; GiB by phase, of phases that were long enough to be seen."""
        host, self._host = self._host, None
        if host is None:
            return {}
        host.__exit__(None, None, None)
        peaks = host.take()
        ends = ("memory/", "_peak_gib")
        return {
            name.removeprefix(ends[0]).removesuffix(ends[1]): gib
            for name, gib in peaks.items()
            if name != "memory/peak_gib"
        }

    def _set(self, name: str) -> None:
        self._phase = name
        if self._tell is not None:
            self._tell(name)
