"""The watch and its keeper over real processes, without Ray: who is named, what is swept, and what is left alone."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gtpo_megatron.errors import NumericsError, WorkerError
from gtpo_megatron.orchestration.watch import run_watch
from gtpo_megatron.orchestration.watch.deaths import Death
from gtpo_megatron.orchestration.watch.keeper import NAMES_EVERY_S, OWNED_FILE
from gtpo_megatron.orchestration.watch.own_engine import swept_process
from gtpo_megatron.orchestration.watch.run_watch import LONGEST_BASE, RunWatch, is_keeper, make_run_temp
from gtpo_megatron.run_folder import state as run_state

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
from gtpo_megatron.orchestration.watch.run_watch import RunWatch
watch = RunWatch(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, text=True, start_new_session=True)
name = child.stdout.readline().strip()
watch.knows("rank 0", child.pid)
(watch.temp_folder / "socket").touch()
print(watch.temp_folder, child.pid, name, flush=True)
time.sleep(600)
"""


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def keeper_of(driver):
    (keeper,) = [p for p in psutil.Process(driver.pid).children() if "watch.keeper" in " ".join(p.cmdline())]
    return keeper.pid


def watches(keeper_pid, pid):
    """Whether a keeper holds a descriptor of a process, from meeting it until it has noted its end."""
    infos = []
    for path in Path(f"/proc/{keeper_pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            infos.append(path.read_text())
    return any(f"Pid:\t{pid}\n" in info for info in infos)


def stop(pid):
    """Stops a process and waits for it: a signal takes effect when its process is next scheduled."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")


@pytest.fixture
def watch(tmp_path):
    watch = RunWatch(tmp_path)
    yield watch
    watch.end()


def test_who_died_first_is_named_with_the_stage_it_died_in(watch, started):
    first, second = started("sleep", "600"), started("sleep", "600")
    watch.knows("rank 0", first.pid)
    watch.knows("rank 1", second.pid)
    watch.stage("update")
    watch._ask()
    first.kill()
    first.wait()
    watch._ask()
    watch.stage("weight_sync")
    second.kill()
    error = watch.explained(WorkerError("rank 1 raised in update: RuntimeError: Connection closed by peer"))
    assert isinstance(error, WorkerError)
    assert re.match(rf"rank 0 \(process {first.pid}\) died( by SIGKILL)? in update; see log.txt", str(error))
    assert "what came of it: rank 1 raised in update" in str(error)
    assert "\n" not in str(error)


def test_a_process_that_is_gone_before_it_is_known_is_dead(watch, started):
    process = started("true")
    process.wait()
    watch.knows("rank 0", process.pid)
    error = watch.explained(WorkerError("rank 1 raised in start: RuntimeError: no answer"))
    assert str(error).startswith(f"rank 0 (process {process.pid}) died in start; see log.txt")


def test_an_error_that_names_it_already_or_has_nothing_to_do_with_a_death_stays(watch, started):
    numbers = NumericsError("gradients are not finite")
    assert watch.explained(numbers) is numbers
    process = started("sleep", "600")
    watch.knows("rank 0", process.pid)
    watch.stage("score")
    watch._ask()
    process.kill()
    process.wait()
    named = WorkerError("rank 0 (tp0 pp0 cp0 dp0) died in score; see log.txt")
    assert watch.explained(named) is named


def test_an_engine_that_was_replaced_is_not_the_cause_of_what_comes_later(watch, started):
    before, after = started("sleep", "600"), started("sleep", "600")
    watch.knows("rollout engine", before.pid)
    before.kill()
    before.wait()
    watch._ask()
    watch.knows("rollout engine", after.pid)
    error = WorkerError("rank 0: no answer in update within 60 s")
    assert watch.explained(error) is error
    watch.expects("rollout engine")
    after.kill()
    after.wait()
    assert watch.explained(error) is error


def test_a_stopped_process_is_named_and_one_that_goes_on_is_not(watch, started, monkeypatch):
    process = started("sleep", "600")
    watch.knows("rank 1", process.pid)
    watch.stage("update")
    late = WorkerError("rank 0, rank 1: no answer in update within 60 s")
    watch._ask()
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: watch._deaths, "the stop is seen")
    watch.check()
    monkeypatch.setattr(run_watch, "STOPPED_S", 0.0)
    with pytest.raises(
        WorkerError, match=rf"^rank 1 \(process {process.pid}\) is stopped \(SIGSTOP\) in (start or )?update;"
    ):
        watch.check()
    assert str(watch.explained(late)).startswith(f"rank 1 (process {process.pid}) is stopped (SIGSTOP) in ")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: not watch._deaths, "it goes on")
    assert watch.explained(late) is late


def test_a_stop_that_is_seen_late_is_not_blamed_on_a_later_stage(watch, started):
    """The others go on for a while: a stage can be over before the keeper looks."""
    process = started("sleep", "600")
    watch.knows("rank 1", process.pid)
    watch.stage("weight_sync")
    wait_until(lambda: watches(watch._keeper.pid, process.pid), "met")
    time.sleep(3 * NAMES_EVERY_S)
    stop(watch._keeper.pid)  # busy elsewhere
    stop(process.pid)
    watch.stage("reward")
    os.kill(watch._keeper.pid, signal.SIGCONT)
    wait_until(lambda: watch._deaths, "the stop is seen")
    # alone, if the keeper looked before it read of the later stage
    assert "weight_sync" in watch._deaths[0].stage.split(" or ")


def test_a_death_that_is_seen_late_is_not_blamed_on_a_later_stage(watch, started):
    """A stage can be over before a busy machine lets the keeper look: both that it may have been are named."""
    process = started("sleep", "600")
    watch.knows("reward process", process.pid)
    watch.stage("checkpoint")
    watch._ask()
    stop(watch._keeper.pid)
    process.kill()
    process.wait()
    watch.stage("rollout")
    os.kill(watch._keeper.pid, signal.SIGCONT)
    wait_until(lambda: watch._deaths, "the death is seen")
    assert watch._deaths[0].stages == ["checkpoint", "rollout"]
    error = WorkerError("reward process died in rollout: The actor is dead")
    assert watch.explained(error) is error


def test_without_rays_gcs_nothing_is_waited_for(watch, started, tmp_path):
    program = tmp_path / "gcs" / "gcs_server"
    program.parent.mkdir()
    program.symlink_to(Path("/bin/sleep").resolve())
    process = started(str(program), "600")
    # between fork and exec a process has no command line
    wait_until(lambda: psutil.Process(process.pid).cmdline()[:1] == [str(program)], "it is up")
    wait_until(lambda: watches(watch._keeper.pid, process.pid), "met")
    time.sleep(1.0)  # for its name to be read
    watch._ask()
    watch.check()
    process.kill()
    process.wait()
    watch._ask()
    assert watch.has_lost_ray
    with pytest.raises(WorkerError, match=r"^Ray's GCS \(process \d+\) died( by SIGKILL)? in start;"):
        watch.check()


def test_all_of_the_run_goes_at_its_end_and_nothing_else(watch, started):
    """A rank with shared memory, a process that only writes to the run's folder; not a logger's, not a reader's."""
    rank = started(sys.executable, "-c", SHARES, stdout=subprocess.PIPE)
    watch.knows("rank 0", rank.pid)
    shared = Path("/dev/shm") / rank.stdout.readline().strip()
    file = watch.temp_folder / "log"
    file.touch()
    with file.open("w") as out, file.open() as read:
        orphan = started("sleep", "600", stdout=out, start_new_session=True)
        logger, reader = started("sleep", "600"), started("sleep", "600", stdin=read)
    foreign = Path("/dev/shm") / f"gtpo_test_{os.getpid()}"
    foreign.touch()
    for process in (rank, orphan, logger, reader):
        wait_until(lambda process=process: watches(watch._keeper.pid, process.pid), "met")
    time.sleep(1.0)  # for what they share to be read
    assert shared.exists()
    watch.closing()
    watch.end()
    try:
        assert (rank.wait(10), orphan.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert logger.poll() is None
        assert reader.poll() is None
        assert not shared.exists()
        assert not watch.temp_folder.exists()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_a_watch_forgets_the_process_id_of_what_died(watch, started):
    dead, alive = started("sleep", "600"), started("sleep", "600")
    watch.knows("rank 0", dead.pid)
    watch.knows("rank 1", alive.pid)
    watch._ask()
    dead.kill()
    dead.wait()
    wait_until(lambda: watch._deaths, "the death is told")
    assert watch._names == {"rank 1": alive.pid}


def test_a_keeper_that_dies_as_the_run_ends_leaves_no_second_one(tmp_path):
    for _ in range(10):
        watch = RunWatch(tmp_path)
        killed = psutil.Process(watch._keeper.pid)
        killed.kill()
        watch.closing()
        watch.end()
        left = [child for child in psutil.Process().children() if is_keeper(child.cmdline())]
        assert left == []
        assert not watch.temp_folder.exists()


def test_a_keeper_that_is_killed_is_replaced(watch, started):
    process = started("sleep", "600")
    watch.knows("rank 0", process.pid)
    before = watch._keeper.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: watch._keeper.pid != before, "another keeper")
    wait_until(lambda: watches(watch._keeper.pid, process.pid), "met")
    process.kill()
    wait_until(lambda: watch._deaths, "the other keeper sees the death")
    assert watch._deaths[0].name == "rank 0"
    stop(watch._keeper.pid)
    watch.closing()
    watch.end()
    assert not watch.temp_folder.exists()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_driver_that_is_killed_leaves_nothing(started, tmp_path, is_stopped):
    driver = started(sys.executable, "-c", DRIVER, str(tmp_path), SHARES, stdout=subprocess.PIPE)
    folder, child, name = driver.stdout.readline().split()
    shared = Path("/dev/shm") / name
    assert Path(folder, "socket").exists()
    assert shared.exists()
    keeper = keeper_of(driver)
    wait_until(lambda: watches(keeper, int(child)), "met")
    if is_stopped:
        stop(int(child))
    driver.kill()
    driver.wait()
    wait_until(lambda: not Path(folder).exists() and not shared.exists(), "swept")
    wait_until(lambda: not psutil.pid_exists(int(child)), "killed")


def test_a_driver_that_a_death_has_taken_along_is_spoken_for(tmp_path):
    out = tmp_path / "out"
    with out.open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), SHARES], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    _, child, name = driver.stdout.readline().split()
    keeper = keeper_of(driver)
    wait_until(lambda: watches(keeper, child), "met")
    os.kill(int(child), signal.SIGKILL)  # maybe before anybody saw that it has shared memory
    wait_until(lambda: not watches(keeper, child), "seen")
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: "gtpo-megatron: WorkerError: rank 0 (process" in out.read_text(), "the line")
    assert out.read_text().count("gtpo-megatron:") == 1
    wait_until(lambda: not (Path("/dev/shm") / name).exists(), "swept")


def test_what_dies_with_a_killed_driver_is_not_blamed_for_it(tmp_path):
    """Ray has the kernel end its raylet with the driver: the line said that the raylet had died first."""
    out = tmp_path / "out"
    dies_along = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n" + SHARES
    with out.open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), dies_along], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    folder, child, _ = driver.stdout.readline().split()
    keeper = keeper_of(driver)
    wait_until(lambda: watches(keeper, child), "met")
    stop(keeper)  # busy elsewhere: it finds both dead
    driver.kill()
    dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    wait_until(lambda: not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() in dead, "both died")
    os.kill(keeper, signal.SIGCONT)
    wait_until(lambda: not Path(folder).exists(), "swept")
    driver.wait()
    driver.stdout.close()
    assert out.read_text() == ""


def test_a_line_that_nobody_reads_and_a_damaged_record_keep_no_keeper_from_sweeping(tmp_path):
    (tmp_path / run_state.STATE_FILE).write_text("[")
    reader, stderr = os.pipe()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), SHARES], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    os.close(stderr)
    folder, child, _ = driver.stdout.readline().split()
    os.close(reader)
    keeper = keeper_of(driver)
    wait_until(lambda: watches(keeper, child), "met")
    os.kill(int(child), signal.SIGKILL)
    wait_until(lambda: not watches(keeper, child), "seen")
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not Path(folder).exists(), "swept")


def test_a_driver_that_hangs_is_ended_though_nobody_reads_the_line(watch, monkeypatch):
    def closed(_):
        raise BrokenPipeError

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(sys.stderr, "write", closed)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        watch._end_driver(Death(name="rank 0", pid=1, at=0.0, stage="update", how="died"))


def test_a_keeper_lives_on_a_full_disk(watch, started):
    """What it writes down is for another keeper; it knows by itself what to remove."""
    (watch.temp_folder / OWNED_FILE).unlink(missing_ok=True)
    (watch.temp_folder / OWNED_FILE).mkdir()  # cannot be written, as root too
    keeper = watch._keeper.pid
    rank = started(sys.executable, "-c", SHARES, stdout=subprocess.PIPE)
    watch.knows("rank 0", rank.pid)
    shared = Path("/dev/shm") / rank.stdout.readline().strip()
    time.sleep(1.0)
    assert watch._keeper.pid == keeper
    watch.closing()
    watch.end()
    assert not shared.exists()


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
        RunWatch(None)


def test_the_temporary_folder_is_this_users_alone():
    one, other = make_run_temp(), make_run_temp()
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
    folder = make_run_temp()
    try:
        assert str(folder).startswith("/tmp/gtpo-")
        base = "b" * (LONGEST_BASE - len(str(folder.parent)))
        session = "session_2026-11-22_09-22-50_196419_4194304"
        assert len(f"{folder}{base}/ray/{session}/sockets/plasma_store") <= 107
    finally:
        shutil.rmtree(folder)
