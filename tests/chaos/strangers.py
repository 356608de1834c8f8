"""Shared memory of other programs, which work beside a run under attack: tests of engines, on another worker."""

import threading
from pathlib import Path

from gtpo_megatron.supervision.process_tree import belongs_to, mapped_shared, process_ids, shared_files

LOOK_S = 0.2


class Strangers:
    """Learns, while it is open, which new files in shared memory are not the run's.

    A file is a stranger's if those who have it mapped, when it is first seen mapped, all have another temporary folder
    than the run. It is looked for all the time: once its owner has ended nobody can tell.

    Args:
        temp: the run's temporary folder.
    """

    def __init__(self, temp: Path) -> None:
        self._temp = temp
        self._before = set(shared_files())
        self._names: set[str] = set()
        self._decided: set[str] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def names(self) -> set[str]:
        """Of files that are there already when this begins, and of strangers' later ones."""
        return self._before | self._names

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            fresh = {inode: name for name, inode in shared_files().items() if name not in self._before | self._decided}
            if fresh:
                self._decide(fresh)

    def _decide(self, fresh: dict[int, str]) -> None:
        mappers: dict[str, list[int]] = {}
        for pid in process_ids():
            for inode in mapped_shared(pid) & fresh.keys():
                mappers.setdefault(fresh[inode], []).append(pid)
        for name, pids in mappers.items():
            self._decided.add(name)
            if not any(belongs_to(pid, self._temp) for pid in pids):
                self._names.add(name)
