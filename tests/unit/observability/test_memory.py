import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from gtpo_megatron.observability import memory
from gtpo_megatron.observability.memory import (
    GIB,
    PeakMemory,
    return_free_memory,
    return_scarce_memory,
    tree_memory_gib,
)

BALLAST_MIB = 64
CHILD = f"b = bytearray(b'x' * ({BALLAST_MIB} << 20)); print('ready', flush=True); input()"


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_the_tree_includes_children(child):
    own = psutil.Process().memory_full_info().pss / GIB
    gib, kind = tree_memory_gib()
    assert gib >= own + BALLAST_MIB / 1024
    assert kind == "pss"


def test_forked_pages_are_counted_once(child):
    """RSS would count the parent's pages again in a child that shares them; PSS splits them."""
    ballast = bytearray(b"x" * (BALLAST_MIB << 20))
    before, _ = tree_memory_gib()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # the child touches nothing and waits to be told
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        after, _ = tree_memory_gib()
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)
    assert after - before < 0.5 * BALLAST_MIB / 1024
    assert len(ballast) == BALLAST_MIB << 20


def test_a_peak_between_two_takes_is_caught_and_then_forgotten(monkeypatch):
    readings, all_read = iter([1.0, 7.0, 2.0]), threading.Event()

    def read(pid):
        reading = next(readings, None)
        if reading is None:
            all_read.set()
        return (0.5 if reading is None else reading), "pss"

    monkeypatch.setattr("gtpo_megatron.observability.memory.tree_memory_gib", read)
    with PeakMemory(interval_s=0.001) as peak:
        assert all_read.wait(timeout=10)  # nobody but the thread reads
    assert peak.take() == {"memory/peak_gib": 7.0}
    assert peak.take() == {"memory/peak_gib": 0.5}


def test_peaks_are_told_apart_by_stage(monkeypatch):
    monkeypatch.setattr("gtpo_megatron.observability.memory.tree_memory_gib", lambda _: (next(readings), "pss"))
    readings, stages = iter([3.0, 5.0, 4.0, 1.0]), iter(["score", "update", "score", ""])
    peak = PeakMemory(stage=lambda: next(stages))
    for _ in range(3):
        peak._read()
    assert peak.take() == {"memory/peak_gib": 5.0, "memory/score_peak_gib": 4.0, "memory/update_peak_gib": 5.0}
    readings, stages = iter([2.0]), iter([""])
    assert peak.take() == {"memory/peak_gib": 2.0}


def test_a_short_stage_is_met(monkeypatch):
    """Readings half a second apart would come after a short stage; the thread waits for stages that it has not met."""
    monkeypatch.setattr("gtpo_megatron.observability.memory.tree_memory_gib", lambda _: (1.0, "pss"))
    asked = []

    def stage():
        asked.append(None)
        return "short" if len(asked) % 7 in (5, 6) else "long"

    with PeakMemory(interval_s=0.5, stage=stage) as peak:
        deadline = time.monotonic() + 10
        while "short" not in peak._peaks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(peak.take()) == {"memory/long_peak_gib", "memory/peak_gib", "memory/short_peak_gib"}


def test_a_tree_that_has_ended_counts_nothing(child):
    child.kill()
    child.communicate()
    assert tree_memory_gib(child.pid) == (0.0, "pss")


def test_a_process_that_refuses_pss_counts_with_its_rss(child, monkeypatch):
    def refuse(self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    gib, kind = tree_memory_gib(child.pid)
    assert kind == "rss"
    assert gib >= BALLAST_MIB / 1024


def test_freed_memory_goes_back_to_the_system():
    kept = [torch.empty(1 << 14).fill_(1.0) for _ in range(2000)]  # 64 KiB each: below what malloc maps by itself
    last = kept[-1]
    del kept
    before = psutil.Process().memory_info().rss
    return_free_memory()
    assert before - psutil.Process().memory_info().rss > 60 << 20
    assert float(last.sum()) == 1 << 14


@pytest.mark.parametrize(("free", "is_returned"), [(7 << 30, False), (1 << 30, True)])
def test_memory_goes_back_where_it_is_scarce(monkeypatch, free, is_returned):
    calls = []
    monkeypatch.setattr(memory, "memory", lambda: (8 << 30, free))
    monkeypatch.setattr(memory, "return_free_memory", lambda: calls.append(None))
    return_scarce_memory()
    assert bool(calls) == is_returned


FAULTS = """
import resource
from gtpo_megatron.observability.memory import keep_free_memory

{first}
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytes([turn]) * (64 << 20)  # more than glibc ever keeps by itself
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("first", "is_kept"), [("", False), ("keep_free_memory()", True)])
def test_kept_memory_has_no_page_faults(first, is_kept):
    """Of a process of its own: what is kept is kept until its end."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(first=first)], capture_output=True, text=True, check=True, timeout=100
    )
    assert (int(done.stdout) < 1000) == is_kept
