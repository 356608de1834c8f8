"""The memory that this process may use: the machine's, or its control group's."""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Bytes of memory that this process may use in all, and bytes of them that are free now.

    Of the machine, or of the tightest control group that this process is in (a container's, a batch job's). What the
    system would give back at once, such as cached files, is free.
    """
    lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    for limit, used in _control_groups():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a line of ``/proc/self/cgroup`` -> files of version 2 or 1, and what is cached, in memory.stat."""


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and use of memory of this process's control group and those around it, where there is a limit."""
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in _GROUP_FILES:
            continue
        limit_file, used_file, cached = _GROUP_FILES[kind]
        mounted = CGROUPS / kind
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit = int((folder / limit_file).read_text(encoding="ascii"))
                used = int((folder / used_file).read_text(encoding="ascii"))
                stat = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                yield limit, used - int(stat.get(cached, 0))
            except (OSError, ValueError):  # "max", or a path of another name space
                pass
            if folder == mounted:
                break
