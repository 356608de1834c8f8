import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.supervision.process_tree import descendants, process_ids, process_stat

ECHO = "tests.unit.rewards.reward_functions:echo"
OBEY = "tests.unit.rewards.reward_functions:obey"
ROOT = Path(__file__).resolve().parents[3]


def session_of(pid):
    """The session of a process that runs; one that has ended may wait for a slow parent of all orphans."""
    try:
        stat = process_stat(pid)
        return None if stat is None or stat.has_ended else os.getsid(pid)
    except ProcessLookupError:
        return None


@pytest.fixture(scope="module")
def pool():
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=3.0)) as pool:
        yield pool


def rows(*responses):
    return [RewardRequest(response=response) for response in responses]


def failures(pool, *responses):
    return [verdict.failure for verdict in pool.grade(rows(*responses))]


def gone(pid, within_s=10.0):
    """True once no process has this id (a zombie counts as gone)."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_rewards_come_back_in_the_order_of_the_rows():
    with RewardPool(RewardConfig(function=ECHO, num_workers=2, timeout_s=5.0)) as pool:
        verdicts = pool.grade(rows(*map(str, range(200))))
        assert [verdict.reward for verdict in verdicts] == list(map(float, range(200)))
        assert pool.grade([]) == []


def test_a_hanging_row_costs_its_limit_once_and_no_other_row():
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=4.0)) as pool:
        start = time.monotonic()
        got = failures(pool, "fine", "hang", *["fine"] * 20)
        assert 4.0 <= time.monotonic() - start < 7.5
        assert got == [None, "took longer than 4 s", *[None] * 20]


@pytest.mark.slow
def test_a_row_that_hangs_in_c_is_killed_all_the_same(pool):
    assert failures(pool, "hang-in-c", "fine") == ["took longer than 3 s", None]


def test_an_exception_is_a_failure_with_its_reason_and_keeps_the_worker(pool):
    workers = pool.process_ids
    assert failures(pool, "raise no such unit", "fine") == ["ValueError: no such unit", None]
    assert pool.process_ids == workers


def test_a_dying_worker_fails_its_own_row_and_is_replaced(pool):
    got = failures(pool, "die", "exit", "fine", "fine")
    assert got == ["ended the worker process with status -9", "ended the worker process with status 3", None, None]
    assert failures(pool, "fine") == [None]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_a_worker_killed_while_idle_costs_nothing_but_its_replacement(who):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=1.0)) as pool:
        (pid,) = pool.process_ids
        (worker,) = descendants(pid)
        os.kill(pid if who == "supervisor" else worker, signal.SIGKILL)
        assert gone(worker)
        assert gone(pid)
        assert failures(pool, "fine", "fine")[1:] == [None]
        assert pool.process_ids[0] != pid


def test_a_row_that_prints_megabytes_fills_neither_the_pipe_nor_the_log(capfd):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=5.0)) as pool:
        assert failures(pool, "print 3000000", "fine", "print 5") == [None] * 3
    printed = capfd.readouterr()
    assert printed.out == ""
    assert 10_000 < len(printed.err) < 11_000
    assert "printed more than 10000 bytes: cut" in printed.err
    assert printed.err.endswith("cut]\nxxxxx\n")  # the next row may print again


@pytest.mark.slow
def test_a_row_that_allocates_gigabytes_fails_and_gives_them_back():
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=20.0, memory_limit_mib=512)) as pool:
        first = pool.process_ids[0]
        assert failures(pool, "allocate 256", "allocate 8192", "allocate-bit-by-bit 8192", "fine") == [
            None,
            *["MemoryError: the row needs more memory than its limit"] * 2,
            None,
        ]
        assert pool.process_ids[0] != first


@pytest.mark.slow
@pytest.mark.parametrize("how", ["write-to-2", "child-writes"])
def test_a_row_that_writes_to_the_descriptor_is_cut_as_well(capfd, how):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=20.0)) as pool:
        assert failures(pool, f"{how} 3000000", "close-2", "fine") == [None] * 3
    printed = capfd.readouterr()
    assert printed.out == ""
    assert 10_000 < len(printed.err) < 11_000
    assert "printed more than 10000 bytes: cut" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["share 1500", "allocate-in-children 300"])
def test_shared_mappings_and_children_count_to_the_memory_of_a_row(how):
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=30.0, memory_limit_mib=512)) as pool:
        start = time.monotonic()
        assert failures(pool, "share 100", how, "fine") == [
            None,
            "MemoryError: the row needs more memory than its limit",
            None,
        ]
        assert time.monotonic() - start < 25.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["daemon", "daemon-and-die", "daemon-and-hang"])
def test_no_child_survives_whatever_session_it_made(tmp_path, how):
    told = tmp_path / "pid"
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=4.0)) as pool:
        pool.grade(rows(f"{how} {told}"))
        assert failures(pool, "fine") == [None]
        is_living = not gone(int(told.read_text()), within_s=0.2)
        assert is_living == (how == "daemon")  # a row that ended well may keep a helper for the next one
    assert gone(int(told.read_text()), within_s=0.5)


@pytest.mark.slow
def test_no_process_survives_that_forks_and_ends_faster_than_one_can_look(tmp_path):
    told = tmp_path / "session"
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=4.0)) as pool:
        pool.grade(rows(f"flee {told}"))
        assert failures(pool, "fine") == [None]
        session = int(told.read_text())
        for _ in range(50):
            assert not [pid for pid in process_ids() if session_of(pid) == session]


@pytest.mark.slow
def test_no_child_survives_a_pool_that_is_killed(tmp_path):
    told = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from gtpo_megatron.config.reward import RewardConfig\n"
        "from gtpo_megatron.rewards.reward_pool import RewardPool\n"
        "from gtpo_megatron.rewards.request import RewardRequest\n"
        f"pool = RewardPool(RewardConfig(function={OBEY!r}, num_workers=1, timeout_s=60.0))\n"
        f"pool.grade([RewardRequest(response='daemon {told}')])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert gone(int(told.read_text()), within_s=5.0)


@pytest.mark.slow
def test_rows_past_the_budget_of_their_batch_have_no_verdict_and_the_next_batch_has():
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=60.0)) as pool:
        start = time.monotonic()
        verdicts = pool.grade(rows("fine", *["sleep 30"] * 50), budget_s=1.0)
        assert time.monotonic() - start < 20.0  # of the 25 minutes that they would take
        assert [verdict.kind == "over_budget" for verdict in verdicts] == [False] + [True] * 50
        assert all(str(verdict.failure).startswith("no time left: ") for verdict in verdicts[1:])
        assert failures(pool, "fine", "fine") == [None, None]


def test_a_row_that_closes_its_pipe_and_hangs_is_killed(pool):
    start = time.monotonic()
    assert failures(pool, "hang-up", "fine") == ["ended the worker process with status -9", None]
    assert time.monotonic() - start < 20.0


def test_an_exception_that_quotes_megabytes_is_cut(pool):
    (reason,) = failures(pool, "raise " + "y" * 10**6)
    assert reason.startswith("ValueError: yyy")
    assert len(reason) < 600


@pytest.mark.slow
def test_many_hanging_rows_cost_their_limits_and_nothing_else():
    """Two workers, four hanging rows of one second: about two seconds and the restarts, and every other row is fine."""
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=1.0)) as pool:
        responses = ["hang", *["fine"] * 30] * 4
        assert failures(pool, *responses) == ["took longer than 1 s" if row == "hang" else None for row in responses]


def test_verdicts_of_a_call_that_was_given_up_reach_no_later_call(monkeypatch):
    with RewardPool(RewardConfig(function=ECHO, num_workers=2, timeout_s=5.0)) as pool:
        collect = Future.result
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.grade(rows(*map(str, range(50))))
        monkeypatch.setattr(Future, "result", collect)
        assert [v.reward for v in pool.grade(rows("-1", "-2", "-3"))] == [-1.0, -2.0, -3.0]


def interrupted(self, timeout=None):
    raise KeyboardInterrupt


def test_closing_while_a_row_runs_does_not_wait_for_it(tmp_path):
    told = tmp_path / "pids"
    pool = RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=30.0))
    row, waiting = pool.submit(*rows(f"child {told}")), pool.submit(*rows("fine"))
    while not told.exists():
        time.sleep(0.01)
    start = time.monotonic()
    pool.close()
    for future in (row, waiting):
        with pytest.raises(WorkerError, match="closed while it was grading"):
            future.result(10)
    assert time.monotonic() - start < 5.0


def test_rows_are_taken_as_they_are_submitted(tmp_path):
    end = tmp_path / "end"
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=60.0)) as pool:
        futures = [pool.submit(row) for row in rows(f"wait-for {end}", "fine", "fine")]
        assert futures[2].result(30).failure is None
        assert not futures[0].done()
        end.touch()
        assert futures[0].result(30).failure is None


@pytest.mark.slow
def test_the_clock_of_a_row_starts_when_a_worker_takes_it():
    """Eight rows of 0.6 s on two workers: the last of them wait for almost as long as the limit."""
    with RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=2.0)) as pool:
        assert failures(pool, *["sleep 0.6"] * 8) == [None] * 8


@pytest.mark.slow
def test_a_kill_takes_along_what_the_row_started(tmp_path):
    told = tmp_path / "pids"
    with RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=4.0)) as pool:
        assert failures(pool, f"child {told}") == ["took longer than 4 s"]
    assert all(gone(int(pid)) for pid in told.read_text().split())


def test_close_ends_the_workers_and_a_closed_pool_says_so():
    pool = RewardPool(RewardConfig(function=OBEY, num_workers=2, timeout_s=1.0))
    pids = pool.process_ids
    pool.close()
    assert all(gone(pid, 0.5) for pid in pids)
    with pytest.raises(WorkerError, match="closed"):
        pool.grade(rows("fine"))


def test_a_pool_that_is_dropped_takes_its_workers_along():
    pool = RewardPool(RewardConfig(function=OBEY, num_workers=1, timeout_s=1.0))
    pid = pool.process_ids[0]
    del pool
    gc.collect()
    assert gone(pid, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", "hang", "hang-in-c"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path, rest):
    """A plain script, without a main guard, killed while its worker is idle or busy."""
    told = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from gtpo_megatron.config.reward import RewardConfig\n"
        "from gtpo_megatron.rewards.reward_pool import RewardPool\n"
        "from gtpo_megatron.rewards.request import RewardRequest\n"
        f"timeout_s = 2.0 if {rest == 'hang-in-c'} else 60.0\n"
        f"pool = RewardPool(RewardConfig(function={OBEY!r}, num_workers=1, timeout_s=timeout_s))\n"
        f"pool.grade([RewardRequest(response='tell-pid {told}')])\n"
        f"pool.grade([RewardRequest(response={rest!r})])\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        end = time.monotonic() + 30
        while not (told.exists() and told.read_text()):
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        parent.kill()
        parent.wait()
    assert gone(int(told.read_text()), within_s=12.0)


def test_a_function_no_worker_can_import_is_a_config_error_and_leaves_no_process():
    with pytest.raises(ConfigError, match=r"reward_functions lacks it"):
        RewardPool(RewardConfig(function="tests.unit.rewards.reward_functions:ecko", num_workers=2, timeout_s=1.0))


def test_a_module_that_kills_its_worker_is_a_worker_error(tmp_path, monkeypatch):
    (tmp_path / "deadly_reward_module.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"did not start.*status 7"):
        RewardPool(RewardConfig(function="deadly_reward_module:f", num_workers=1, timeout_s=1.0))
