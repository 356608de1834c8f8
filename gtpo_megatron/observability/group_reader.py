"""Which files of ``rollouts/`` a report reads, and not twice while it follows a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.rollout_log import ROLLOUT_FOLDER, iter_rollouts, rollout_files
from gtpo_megatron.observability.sampled_groups import SampledGroup, sampled_groups

T = TypeVar("T")

MAX_GROUPS = 64
"""Sampled groups read of a run: from steps spread over all of it, the first and the last among them."""
MAX_UNREADABLE_FILES = 5
"""After so many the rest of a folder is left alone: it is of an older version."""

_Known = tuple[tuple[int, int, float], list[SampledGroup]]
"""Time, size and threshold that a file was read with, and what was in it."""


class GroupReader:
    """Reads sampled groups; a file that has not changed since the last pass over its folder is not read again."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[Path, _Known]] = {}

    def read(self, folder: Path, *, threshold: float) -> tuple[tuple[SampledGroup, ...], str]:
        """Groups of the last readable step and of steps spread over those before it.

        Args:
            folder: of the run.
            threshold: least reward of a correct response.

        Returns:
            ``MAX_GROUPS`` groups at most by ascending step, and a sentence on files that cannot be read; empty if all
            can.
        """
        before, known = self._known.get(folder, {}), {}
        files = rollout_files(folder)
        num_files, unreadable = len(files), []

        def groups_of(step: int, path: Path) -> list[SampledGroup]:
            try:
                state = path.stat()
                mark = (state.st_mtime_ns, state.st_size, threshold)
                found = before.get(path)
                if found is None or found[0] != mark:
                    groups = sampled_groups(step, iter_rollouts(path), threshold=threshold, max_groups=MAX_GROUPS)
                    found = (mark, groups)
            except (DataError, OSError) as error:
                unreadable.append(str(error))
                return []
            known[path] = found
            return found[1]

        last: list[SampledGroup] = []
        while files and not last and len(unreadable) < MAX_UNREADABLE_FILES:
            last = groups_of(*files.pop())
        chosen = list(last)
        num_more = (MAX_GROUPS - len(chosen)) // max(1, len(chosen))
        for step, path in reversed(spread(files, num_more)):  # the newest first: older ones may be of an older version
            if len(unreadable) == MAX_UNREADABLE_FILES:
                break
            chosen += groups_of(step, path)[: MAX_GROUPS - len(chosen)]
        self._known[folder] = known
        return tuple(sorted(chosen, key=lambda group: group.step)), _remark(unreadable, num_files)


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of the items at most, spread over all of them, the first among them.

    An item ranks by how often 2 divides its index, later ones first among equals. So a list that has grown by one
    keeps all of the choice but one or two, and a page that follows a run reads as few files anew.
    """
    ranked = sorted(range(len(items)), key=lambda index: (index & -index or 2 * len(items), index), reverse=True)
    return [items[index] for index in sorted(ranked[:count])]


def _remark(unreadable: Sequence[str], num_files: int) -> str:
    if not unreadable:
        return ""
    if len(unreadable) == 1:
        return unreadable[0]
    tried = ", and no older ones were tried" if len(unreadable) == MAX_UNREADABLE_FILES else ""
    return (
        f"{len(unreadable)} of {num_files} files in {ROLLOUT_FOLDER}/ cannot be read{tried}. The first: {unreadable[0]}"
    )
