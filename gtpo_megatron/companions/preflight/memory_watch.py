"""Memory by phase of a step: of every GPU as nvidia-smi sees it, or of the process tree where there is none.

What nvidia-smi counts is everything on a device: contexts, communicators and other processes too, which no process
knows of itself. One ``nvidia-smi`` a node prints it every tenth of a second.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from gtpo_megatron.errors import GTPOError
from gtpo_megatron.observability.memory import tree_memory_gib

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
        self._thread = threading.Thread(target=self._read, name="nvidia-smi", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                uuid, _, used = (part.strip() for part in line.partition(","))
                if used.isdigit():
                    key = (self.phase, uuid)
                    self.peaks[key] = max(self.peaks.get(key, 0), int(used) * MIB)

    def end(self) -> dict[tuple[str, str], int]:
        """Ends nvidia-smi and the thread; returns what was read."""
        self.process.terminate()
        self.process.wait()
        self._thread.join()
        return self.peaks


def start_smi(_instance: object) -> bool:
    """Runs in one process of each node: starts its stream; False where there is no nvidia-smi.

    A stream whose reader has died ends with its next line.
    """
    if shutil.which(SMI[0]) is None:
        return False
    _watchers.setdefault("smi", _SmiStream())
    return True


def set_phase(_instance: object, phase: str) -> None:
    """Runs in the same processes: what is read from now on counts for this phase; empty: for none."""
    _watchers["smi"].phase = phase


def stop_smi(_instance: object) -> dict[tuple[str, str], int]:
    """Runs in the same processes: ends the stream; returns bytes by phase and device, nothing without one."""
    stream = _watchers.pop("smi", None)
    return {} if stream is None else stream.end()


class MemoryWatch:
    """Memory by phase.

    Phases do not nest. On GPUs they are told to every node, which keeps peaks; on a machine without GPUs the memory of
    this process and of all that it has started is read at the end of each, when tensors of the phase are still held.
    """

    def __init__(self) -> None:
        self._tell: Callable[[str], object] = lambda _phase: None
        self._reads_host = False
        self._host: dict[str, float] = {}

    def watch_host(self) -> None:
        """Begins to read the memory of this machine's processes."""
        self._reads_host = True

    def watch_devices(self, tell: Callable[[str], object]) -> None:
        """Begins to tell nodes the phases.

        Args:
            tell: tells all nodes, and returns when they know.
        """
        self._tell = tell

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts for this phase what is used within the block."""
        self._tell(name)
        try:
            yield
        except BaseException:
            with suppress(GTPOError):  # of processes that cannot be told any more; the first error says more
                self._tell("")
            raise
        if self._reads_host:
            gib, _ = tree_memory_gib()
            self._host[name] = max(gib, self._host.get(name, 0.0))
        self._tell("")

    @property
    def host_gib(self) -> Mapping[str, float]:
        """GiB of this machine's processes by phase."""
        return dict(self._host)
