"""Whom a driver, this process, takes for its run's, and what becomes of files in shared memory."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtpo_megatron.supervision import process_watch as module
from gtpo_megatron.supervision.process_tree import remove_unused_shared
from gtpo_megatron.supervision.process_watch import ProcessWatch


@pytest.fixture
def processes():
    return ProcessWatch([])


@pytest.fixture
def child_and_grandchild(started):
    child = started("sh", "-c", "sleep 600 & echo $!; wait", stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    yield child, grandchild
    os.kill(grandchild, signal.SIGKILL)


def test_a_process_whose_parent_the_listing_lacks_is_the_runs(processes, child_and_grandchild, monkeypatch, tmp_path):
    child, grandchild = child_and_grandchild
    monkeypatch.setattr(module, "process_ids", lambda: {grandchild})
    assert processes.left(tmp_path, with_unnamed=True) == {child.pid, grandchild}


def test_children_from_before_the_run_are_not_the_runs(child_and_grandchild, tmp_path):
    child, grandchild = child_and_grandchild
    left = ProcessWatch([child.pid]).left(tmp_path, with_unnamed=True)
    assert not {child.pid, grandchild} & left


def test_an_orphan_that_is_known_stays_the_runs(processes, child_and_grandchild, tmp_path):
    child, grandchild = child_and_grandchild
    processes.knows("rank 0", child.pid)
    processes.look()
    child.kill()
    child.wait()
    assert processes.left(tmp_path, with_unnamed=False) == {grandchild}
    assert str(processes.cause()).replace(" by SIGKILL", "") == (f"rank 0 (process {child.pid}) died in start")


def test_writers_that_have_ended_are_not_kept(processes, started):
    """A long run has thousands, and each end would be looked at every time."""
    writer = started("sleep", "600")
    processes.knows("checkpoint writer of rank 0", writer.pid)
    writer.kill()
    writer.wait()
    processes.look()
    assert processes.seen() == []


def test_a_name_ends_with_its_process(processes, started):
    engine = started("sleep", "600")
    processes.knows("rollout engine", engine.pid)
    engine.kill()
    engine.wait()
    assert processes.cause().name == "rollout engine"
    assert len(processes.seen()) == 1
    processes.knows("rollout engine", engine.pid)  # gone before it is seen
    assert len(processes.seen()) == 1
    assert engine.pid not in processes._names, "whoever gets its process id next is a stranger"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_without_descriptors_a_process_is_met_at_a_later_look(processes, started, monkeypatch, code):
    def fails(path):
        raise OSError(code, os.strerror(code))

    rank = started("sleep", "600")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        processes.knows("rank 0", rank.pid)
        with pytest.raises(OSError, match=os.strerror(code)):
            processes.look()
    processes.look()
    rank.kill()
    rank.wait()
    assert processes.cause().name == "rank 0"


@pytest.fixture
def mapped():
    """Maps files of these paths."""
    with contextlib.ExitStack() as stack:

        def add(path):
            with path.open("r+b") as file:
                stack.enter_context(mmap.mmap(file.fileno(), 0))

        yield add


@pytest.fixture
def files(shared_memory):
    """Two that a sweep may remove, if nobody has mapped them."""
    paths = [shared_memory / f"psm_{number}" for number in range(2)]
    for path in paths:
        path.write_bytes(b"queue")
    return paths


def test_a_file_that_nobody_has_mapped_goes_unless_it_was_there_before(files, shared_memory, mapped):
    before = shared_memory / "psm_2"
    before.write_bytes(b"queue")
    mapped(files[1])
    remove_unused_shared({before.name})
    assert [path.exists() for path in (*files, before)] == [False, True, True]
    remove_unused_shared({before.name}, of={os.getpid()})
    assert [path.exists() for path in (*files, before)] == [False, False, True]


def test_a_file_that_is_mapped_a_moment_after_its_start_stays(files, mapped, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: mapped(files[1]))
    remove_unused_shared(())
    assert [path.exists() for path in files] == [False, True]


def test_what_others_put_into_shared_memory_stays(shared_memory, files, monkeypatch):
    """A data set that nobody has mapped, another user's queue."""
    data, queue = shared_memory / "torch_dataset", files[0]
    data.write_bytes(b"data")
    if os.geteuid() == 0:
        os.chown(queue, 12345, -1)
    else:  # a file cannot be given away
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    remove_unused_shared(())
    assert (data.exists(), queue.exists()) == (True, True)


def test_a_file_that_cannot_be_removed_is_passed_over(files, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        remove_unused_shared(())
    assert files[0].exists()


FORKING = """
import os, sys
child = os.fork()
if not child:  # has its parent's command line until it is another program
    sys.stdin.readline()
    code = "print(1, flush=True); import time; time.sleep(600)"
    os.execv(sys.executable, [sys.executable, "-c", code, *sys.argv[2:]])
print(child, flush=True)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("arguments", "name"), [((), ""), (("dashboard/agent.py",), "Ray's dashboard agent")], ids=["a worker", "an agent"]
)
def test_what_a_raylet_forks_is_no_raylet(processes, started, arguments, name):
    """An agent that was seen between fork and exec was a raylet until its end once, with a raylet's consequences."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = started(sys.executable, "-c", FORKING, "raylet/raylet", *arguments, **pipes)
    child = int(parent.stdout.readline())
    try:
        names = processes._processes
        processes.look()
        assert (names[parent.pid].name, names[child].name) == ("Ray's raylet", "")
        assert names[child].is_of_run
        parent.stdin.write("now\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "1\n"
        processes.look()
        assert (names[parent.pid].name, names[child].name) == ("Ray's raylet", name)
    finally:
        os.kill(child, signal.SIGKILL)
