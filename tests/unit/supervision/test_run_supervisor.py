"""The supervisor of a run over real processes, without Ray: who is named, what is swept, and what is left alone."""

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from gtpo_megatron.errors import NumericsError, WorkerError
from gtpo_megatron.orchestration import run_supervisor as module
from gtpo_megatron.orchestration.on_ray.collect import explained
from gtpo_megatron.orchestration.run_supervisor import (
    LONGEST_BASE,
    RunSupervisor,
    is_supervisor,
    make_run_temp,
    swept_process,
)
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.supervision import deaths
from gtpo_megatron.supervision.process_tree import command_line, descendants

PATIENCE_S = 120.0
"""On a machine that is busy with others."""

SHARES = (
    "import time; from multiprocessing import resource_tracker; "
    "from multiprocessing.shared_memory import SharedMemory; "
    "s = SharedMemory(create=True, size=64); resource_tracker.unregister(s._name, 'shared_memory'); "
    "print(s.name, flush=True); time.sleep(600)"
)
"""A process that has something in shared memory, and nobody to remove it."""

DRIVER = """
import subprocess, sys, time
from pathlib import Path
from gtpo_megatron.orchestration.run_supervisor import RunSupervisor
supervisor = RunSupervisor(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, text=True, start_new_session=True)
name = child.stdout.readline().strip()
supervisor.knows("rank 0", child.pid)
(supervisor.temp_folder / "socket").touch()
print(supervisor.temp_folder, child.pid, name, flush=True)
time.sleep(600)
"""


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def helper(driver):
    """The one helper of a driver; None if it has none."""
    found = [pid for pid in descendants(driver) if is_supervisor(command_line(pid))]
    assert len(found) < 2
    return found[0] if found else None


def observes(observer, pid):
    """Whether a process holds a descriptor of another one, from meeting it until it has noted its end."""
    infos = []
    for path in Path(f"/proc/{observer}/fdinfo").iterdir():
        try:
            infos.append(path.read_text())
        except FileNotFoundError:
            continue
    return any(f"Pid:\t{pid}\n" in info for info in infos)


def is_noted(folder, name):
    """Whether a driver's note has a name or a number."""
    file = Path(folder, module.NOTE_FILE)
    return file.exists() and name in file.read_text()


def stop(pid):
    """Stops a process and waits for it: a signal takes effect when its process is next scheduled."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")


@pytest.fixture
def supervisor(tmp_path):
    supervisor = RunSupervisor(tmp_path)
    yield supervisor
    supervisor.end()


def test_who_died_first_is_named_with_the_stage_it_died_in(supervisor, started):
    first, second = started("sleep", "600"), started("sleep", "600")
    supervisor.knows("rank 0", first.pid)
    supervisor.knows("rank 1", second.pid)
    supervisor.stage("update")
    first.kill()
    first.wait()
    supervisor.stage("weight_sync")
    second.kill()
    second.wait()
    error = WorkerError("rank 1 raised in update: RuntimeError: Connection closed by peer")
    error = explained(error, supervisor.cause())
    assert isinstance(error, WorkerError)
    assert re.match(rf"rank 0 \(process {first.pid}\) died( by SIGKILL)? in update; see log.txt", str(error))
    assert "what came of it: rank 1 raised in update" in str(error)
    assert "\n" not in str(error)


def test_a_process_that_is_gone_before_it_is_known_is_dead(supervisor, started):
    process = started("true")
    process.wait()
    supervisor.knows("rank 0", process.pid)
    assert str(supervisor.cause()) == f"rank 0 (process {process.pid}) died in start"


def test_an_error_that_names_it_already_or_has_nothing_to_do_with_a_death_stays(supervisor, started):
    numbers = NumericsError("gradients are not finite")
    assert explained(numbers, supervisor.cause()) is numbers
    process = started("sleep", "600")
    supervisor.knows("rank 0", process.pid)
    supervisor.stage("score")
    process.kill()
    process.wait()
    named = WorkerError("rank 0 (tp0 pp0 cp0 dp0) died in score; see log.txt")
    assert explained(named, supervisor.cause()) is named


def test_an_engine_that_was_replaced_is_not_the_cause_of_what_comes_later(supervisor, started):
    before, after = started("sleep", "600"), started("sleep", "600")
    supervisor.knows("rollout engine", before.pid)
    before.kill()
    before.wait()
    assert supervisor.cause().name == "rollout engine"
    supervisor.knows("rollout engine", after.pid)
    assert supervisor.cause() is None
    supervisor.expects("rollout engine")
    after.kill()
    after.wait()
    assert supervisor.cause() is None


def test_without_rays_gcs_nothing_is_waited_for(supervisor, started, tmp_path):
    program = tmp_path / "gcs" / "gcs_server"
    program.parent.mkdir()
    program.symlink_to(Path("/bin/sleep").resolve())
    process = started(str(program), "600")
    # between fork and exec a process has no command line
    wait_until(lambda: psutil.Process(process.pid).cmdline()[:1] == [str(program)], "it is up")
    wait_until(lambda: "Ray's GCS" in [one.name for one in supervisor._processes.values()], "met")
    supervisor.check()
    process.kill()
    process.wait()
    wait_until(lambda: supervisor._broken, "seen")
    assert supervisor.has_lost_ray
    with pytest.raises(WorkerError, match=r"^Ray's GCS \(process \d+\) died( by SIGKILL)? in start;"):
        supervisor.check()
    supervisor.closing()
    assert supervisor.has_lost_ray


def test_all_of_the_run_goes_at_its_end_and_nothing_else(supervisor, started):
    """A rank with shared memory, a process that only writes to the run's folder; not a logger's, not a reader's."""
    rank = started(sys.executable, "-c", SHARES, stdout=subprocess.PIPE)
    supervisor.knows("rank 0", rank.pid)
    shared = Path("/dev/shm") / rank.stdout.readline().strip()
    file = supervisor.temp_folder / "log"
    file.touch()
    with file.open("w") as out, file.open() as read:
        orphan = started("sleep", "600", stdout=out, start_new_session=True)
        logger, reader = started("sleep", "600"), started("sleep", "600", stdin=read)
    for process in (orphan, logger, reader):
        wait_until(lambda process=process: observes(os.getpid(), process.pid), "met")
    assert shared.exists()
    supervisor.closing()
    supervisor.end()
    assert (rank.wait(10), orphan.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert logger.poll() is None
    assert reader.poll() is None
    assert not shared.exists()
    assert not supervisor.temp_folder.exists()
    assert helper(os.getpid()) is None


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["", "its rank is stopped"])
def test_a_driver_that_is_killed_leaves_nothing(started, tmp_path, trouble):
    driver = started(sys.executable, "-c", DRIVER, str(tmp_path), SHARES, stdout=subprocess.PIPE)
    folder, child, name = driver.stdout.readline().split()
    shared = Path("/dev/shm") / name
    assert Path(folder, "socket").exists()
    assert shared.exists()
    wait_until(lambda: helper(driver.pid), "it is there")
    wait_until(lambda: is_noted(folder, f'"{child}"'), "met")
    if trouble:
        stop(int(child))
    driver.kill()
    driver.wait()
    wait_until(lambda: not Path(folder).exists() and not shared.exists(), "swept")
    wait_until(lambda: not psutil.pid_exists(int(child)), "killed")


def test_a_driver_that_a_death_has_taken_along_is_spoken_for(tmp_path):
    out = tmp_path / "out"
    run_state.record_start(tmp_path)
    with out.open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), SHARES], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    folder, child, name = driver.stdout.readline().split()
    os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: is_noted(folder, "rank 0"), "seen")
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not Path(folder).exists(), "swept")
    assert out.read_text().count("gtpo-megatron:") == 1
    assert "gtpo-megatron: WorkerError: rank 0 (process" in out.read_text()
    assert not (Path("/dev/shm") / name).exists()


def test_what_dies_with_a_killed_driver_is_not_blamed_for_it(tmp_path):
    """Ray has the kernel end its raylet with the driver: the line said that the raylet had died first."""
    out = tmp_path / "out"
    dies_along = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n" + SHARES
    with out.open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), dies_along], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    folder, child, _ = driver.stdout.readline().split()
    wait_until(lambda: helper(driver.pid), "it is there")
    wait_until(lambda: is_noted(folder, f'"{child}"'), "met")
    observer = helper(driver.pid)
    stop(observer)  # busy elsewhere: it finds both dead
    driver.kill()
    dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    wait_until(lambda: not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() in dead, "both died")
    os.kill(observer, signal.SIGCONT)
    wait_until(lambda: not Path(folder).exists(), "swept")
    driver.wait()
    driver.stdout.close()
    assert out.read_text() == ""


def test_a_line_that_nobody_reads_and_a_damaged_record_keep_nobody_from_sweeping(tmp_path):
    (tmp_path / run_state.STATE_FILE).write_text("[")
    reader, stderr = os.pipe()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), SHARES], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    os.close(stderr)
    folder, child, _ = driver.stdout.readline().split()
    os.close(reader)
    os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: is_noted(folder, "rank 0"), "seen")
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not Path(folder).exists(), "swept")


HANGS = """
import subprocess, sys, time
from pathlib import Path
from gtpo_megatron.orchestration import run_supervisor
from gtpo_megatron.run_folder import state
from gtpo_megatron.supervision import deaths
run_supervisor.LAST_RESORT_S = deaths.OWN_WORDS_S = 0.1
state.record_start(Path(sys.argv[1]))
supervisor = run_supervisor.RunSupervisor(Path(sys.argv[1]))
supervisor.stage("update")
rank = subprocess.Popen(["sleep", "600"])
supervisor.knows("rank 1", rank.pid)
print(supervisor.temp_folder, flush=True)
rank.kill()
if sys.argv[2]:
    sys.stderr.close()
time.sleep(600)
"""


@pytest.mark.parametrize("is_closed", ["", "nobody reads the line"])
def test_a_driver_that_hangs_after_a_death_is_ended(tmp_path, is_closed):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path), is_closed],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert re.match(r"WorkerError: rank 1 \(process \d+\) died", run_state.read_state(tmp_path).outcome)
    assert is_closed or len(re.findall(r"^gtpo-megatron: WorkerError: rank 1 \(", done.stderr, re.MULTILINE)) == 1
    wait_until(lambda: not Path(done.stdout.strip()).exists(), "swept")


def test_an_engine_in_this_process_leaves_its_files_in_a_folder_that_goes(monkeypatch):
    before = tempfile.gettempdir()
    monkeypatch.setenv("TMPDIR", before)
    with swept_process():
        folder = Path(tempfile.gettempdir())
        assert folder != Path(before)
        (folder / "vllm_dist").touch()
        worker = subprocess.Popen(["sleep", "600"])
        assert os.environ["TMPDIR"] == str(folder)
    assert worker.wait(10) == -signal.SIGKILL
    assert not folder.exists()
    assert tempfile.gettempdir() == before


def test_a_temporary_folder_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(WorkerError, match="^the temporary folder /proc/none cannot be written: .*; make room there"):
        RunSupervisor(None)


def test_a_full_disk_does_not_end_the_supervisor(supervisor, started, monkeypatch):
    """The note is for the helper."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_file", full)
    rank = started("sleep", "600")
    supervisor.stage("update")
    supervisor.knows("rank 0", rank.pid)
    monkeypatch.setattr(deaths, "OWN_WORDS_S", 0.0)
    rank.kill()
    wait_until(lambda: supervisor._broken, "seen")


def test_the_temporary_folder_is_this_users_alone():
    one, other = make_run_temp({}), make_run_temp({})
    try:
        assert one != other
        for folder in (one, other):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert folder.stat().st_uid == os.getuid()
    finally:
        shutil.rmtree(one)
        shutil.rmtree(other)


def test_a_socket_has_a_short_name_wherever_temporary_files_are(tmp_path, monkeypatch):
    """107 characters at most; Ray's lie below ``ray/session_DATE_TIME_MICROSECONDS_PID/sockets``."""
    deep = tmp_path / ("a" * 40)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = make_run_temp({})
    try:
        assert str(folder).startswith("/tmp/gtpo-")
        base = "b" * (LONGEST_BASE - len(str(folder.parent)))
        session = "session_2026-11-22_09-22-50_196419_4194304"
        assert len(f"{folder}{base}/ray/{session}/sockets/plasma_store") <= 107
    finally:
        shutil.rmtree(folder)
