"""Memory that is free is that of the tightest control group."""

import pytest

from gtpo_megatron import machine_memory
from gtpo_megatron.machine_memory import memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 24 GiB with 8 GiB free, on which this process is in the control groups that are given."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {24 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\nHuge: 0\n")
    monkeypatch.setattr(machine_memory, "PROC", proc)
    monkeypatch.setattr(machine_memory, "CGROUPS", groups)

    def write(lines, limits):
        if lines is not None:
            (proc / "self" / "cgroup").write_text(lines)
        for folder, files in limits.items():
            (groups / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (groups / folder / name).write_text(f"{content}\n")

    return write


def v2(limit, used, cached=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cached}"}


def v1(limit, used, cached=0):
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"cache 5\ntotal_inactive_file {cached}",
    }


@pytest.mark.parametrize(
    ("lines", "limits", "total", "free"),
    [
        (None, {}, 24, 8),
        ("0::/\n", {}, 24, 8),
        ("0::/job\n", {"job": v2("max", 5 * GIB)}, 24, 8),
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB)}, 4, 1),
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB, 2 * GIB)}, 4, 3),
        ("0::/job/step\n", {"job": v2(16 * GIB, 10 * GIB), "job/step": v2("max", GIB)}, 16, 6),
        ("0::/job/step\n", {"job": v2(16 * GIB, 10 * GIB), "job/step": v2(12 * GIB, 11 * GIB)}, 12, 1),
        ("0::/of/another/name/space\n", {"": v2(4 * GIB, 5 * GIB)}, 4, 0),
        ("5:cpu,cpuacct:/job\n4:memory:/job\n", {"memory/job": v1(6 * GIB, 4 * GIB, GIB)}, 6, 3),
        ("4:memory:/job\n0::/\n", {"memory/job": v1(2**63 - 4096, 4 * GIB), "memory": v1(5 * GIB, 0)}, 5, 5),
        ("0::/job\n", {"job": v2(64 * GIB, GIB)}, 24, 8),
    ],
)
def test_memory_of_a_control_group(machine, lines, limits, total, free):
    machine(lines, limits)
    assert memory() == (total * GIB, free * GIB)


def test_memory_of_this_machine():
    total, free = memory()
    assert 0 < free < total
