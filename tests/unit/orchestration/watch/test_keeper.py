"""The keeper in this process: whom it takes for the run's, and what it does where nothing can be looked at."""

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from gtpo_megatron.orchestration.watch import keeper
from gtpo_megatron.orchestration.watch.keeper import BEFORE_FILE, RunKeeper, _Member
from gtpo_megatron.proc_files import SHARED_MEMORY, command_line, process_stat


@pytest.fixture
def own_keeper(tmp_path):
    """A keeper in this process, whose driver is this process."""
    (tmp_path / BEFORE_FILE).write_text('{"children": [], "shared": []}', encoding="utf-8")
    return RunKeeper(os.getpid(), tmp_path, None)


@pytest.fixture
def child_and_grandchild(started):
    child = started("sh", "-c", "sleep 600 & echo $!; wait", stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    yield child.pid, grandchild
    os.kill(grandchild, signal.SIGKILL)


def test_a_process_whose_parent_the_listing_lacks_is_the_runs(own_keeper, child_and_grandchild, monkeypatch):
    child, grandchild = child_and_grandchild
    monkeypatch.setattr(keeper, "process_ids", lambda: {grandchild})
    own_keeper._look()
    assert own_keeper._members.keys() == {child, grandchild}


def test_the_child_of_a_process_with_a_members_former_id_is_not_killed(own_keeper, child_and_grandchild):
    child, grandchild = child_and_grandchild
    own_keeper._members[child] = _Member(
        pid=child, start_ticks=process_stat(child).start_ticks, parent=os.getpid(), descriptor=-1, is_of_run=True
    )
    assert {child, grandchild} <= set(own_keeper._left())
    own_keeper._members[child].start_ticks -= 1
    del own_keeper._members[grandchild]
    assert not {child, grandchild} & set(own_keeper._left())


def test_a_name_ends_with_its_process(own_keeper, started):
    engine = started("sleep", "600")
    own_keeper._obey({"name": "rollout engine", "pid": engine.pid})
    engine.kill()
    engine.wait()
    own_keeper._note_ends({member.descriptor for member in own_keeper._members.values()})
    assert engine.pid not in own_keeper._told
    own_keeper._obey({"name": "rollout engine", "pid": engine.pid})  # gone before it is seen
    assert engine.pid not in own_keeper._told


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_driver_that_cannot_be_looked_at_lives(own_keeper, monkeypatch, code):
    def fails(path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_bytes", fails)
    assert own_keeper._driver_lives()


def test_a_keeper_without_descriptors_looks_again(own_keeper, started, monkeypatch):
    engine, listed = started("sleep", "600"), os.listdir
    looks = []

    def listdir(path):
        looks.append(path)
        if len(looks) < 5:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        own_keeper._has_ended = engine.pid in own_keeper._members
        return listed(path)

    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(os, "listdir", listdir)
        own_keeper.run()
    assert len(looks) > 5


def test_a_file_whose_maker_ended_before_anybody_looked_goes_unless_it_is_used(own_keeper, started):
    making = (
        "from multiprocessing import resource_tracker; from multiprocessing.shared_memory import SharedMemory; "
        "s = SharedMemory(create=True, size=64); resource_tracker.unregister(s._name, 'shared_memory'); print(s.name)"
    )
    process = started("sleep", "600")
    own_keeper._obey({"name": "rank 0", "pid": process.pid})
    names = [subprocess.check_output([sys.executable, "-c", making], text=True).strip() for _ in range(2)]
    process.kill()
    process.wait()
    own_keeper._note_ends(set(own_keeper._by_descriptor))
    own_keeper._look()
    late = subprocess.check_output([sys.executable, "-c", making], text=True).strip()  # after the last end
    user = SharedMemory(name=names[1])
    try:
        own_keeper.sweep()
        assert [(SHARED_MEMORY / name).exists() for name in (*names, late)] == [False, True, True]
    finally:
        user.close()
        for name in (*names, late):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_what_others_put_into_shared_memory_stays(own_keeper, started, monkeypatch):
    """Even just before a process of the run ends, and where nobody has it mapped: a data set, another user's queue."""
    process = started("sleep", "600")
    own_keeper._obey({"name": "rank 0", "pid": process.pid})
    data, queue = (SHARED_MEMORY / f"{kind}_of_this_test_{os.getpid()}" for kind in ("dataset", "psm"))
    data.write_bytes(b"data")
    queue.write_bytes(b"queue")
    if os.geteuid() == 0:
        os.chown(queue, 12345, -1)
    else:  # a file cannot be given away
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    try:
        process.kill()
        process.wait()
        own_keeper._note_ends(set(own_keeper._by_descriptor))
        own_keeper._look()
        own_keeper.sweep()
        assert (data.exists(), queue.exists()) == (True, True)
    finally:
        data.unlink()
        queue.unlink()


def _refuse(path, missing_ok=False):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))


def test_a_file_that_cannot_be_removed_does_not_keep_the_folder(own_keeper, monkeypatch):
    name = f"psm_of_this_test_{os.getpid()}"
    (SHARED_MEMORY / name).write_bytes(b"queue")
    own_keeper._shared_owned.add(name)
    try:
        monkeypatch.setattr(Path, "unlink", _refuse)
        own_keeper.sweep()
        assert not own_keeper._folder.exists()
    finally:
        monkeypatch.undo()
        (SHARED_MEMORY / name).unlink()


FORKING = """
import os, sys
child = os.fork()
if not child:  # has its parent's command line until it is another program
    sys.stdin.readline()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[2:]])
print(child, flush=True)
os.waitpid(child, 0)
"""


@pytest.fixture
def forking(started):
    """Starts something that is called like Ray's raylet, whose child becomes another program at the next line."""
    children = []

    def fork(*arguments):
        parent = started(
            sys.executable, "-c", FORKING, "raylet/raylet", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        children.append(int(parent.stdout.readline()))
        return parent, children[-1]

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "name"), [((), ""), (("dashboard/agent.py",), "Ray's dashboard agent")], ids=["a worker", "an agent"]
)
def test_what_a_raylet_forks_is_no_raylet(own_keeper, forking, arguments, name):
    """Once an agent that was seen between fork and exec was a raylet until its end, with a raylet's consequences."""
    parent, child = forking(*arguments)
    own_keeper._look()
    members = own_keeper._members
    assert (members[parent.pid].name, members[child].name) == ("Ray's raylet", "")
    assert (members[child].is_final, members[child].is_of_run) == (False, True)
    parent.stdin.write("now\n")
    parent.stdin.flush()
    deadline = time.monotonic() + 60
    while command_line(child) in ([], command_line(parent.pid)) and time.monotonic() < deadline:  # none within exec
        time.sleep(0.01)
    own_keeper._names_at = 0.0
    own_keeper._look()
    assert (members[parent.pid].name, members[child].name) == ("Ray's raylet", name)
    parent.stdin.close()
