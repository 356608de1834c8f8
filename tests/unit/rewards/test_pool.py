import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.rewards.pool import RewardPool

OBEY = "tests.unit.rewards.reward_functions:obey"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(OBEY, num_workers=2, timeout_s=1.0) as pool:
        yield pool


def failures(pool, *responses):
    return [verdict.failure for verdict in pool.grade(responses, [""] * len(responses))]


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


def test_rewards_come_back_in_the_order_of_the_rows():
    with RewardPool("tests.unit.rewards.reward_functions:echo", num_workers=2, timeout_s=5.0) as pool:
        verdicts = pool.grade([str(i) for i in range(200)], [""] * 200)
        assert [verdict.reward for verdict in verdicts] == list(map(float, range(200)))
        assert pool.grade([], []) == []


def test_a_hanging_row_costs_its_limit_once_and_no_other_row(pool):
    start = time.monotonic()
    got = failures(pool, "fine", "hang", *["fine"] * 20)
    assert 1.0 <= time.monotonic() - start < 1.9
    assert got == [None, "took longer than 1 s", *[None] * 20]


def test_a_row_that_hangs_in_c_is_killed_all_the_same(pool):
    assert failures(pool, "hang-in-c", "fine") == ["took longer than 1 s", None]


def test_an_exception_is_a_failure_with_its_reason_and_keeps_the_worker(pool):
    workers = [worker.process.pid for worker in pool._workers]
    assert failures(pool, "raise no such unit", "fine") == ["ValueError: no such unit", None]
    assert [worker.process.pid for worker in pool._workers] == workers


def test_a_dying_worker_fails_its_own_row_and_is_replaced(pool):
    got = failures(pool, "die", "exit", "fine", "fine")
    assert got == ["ended the worker process with status -9", "ended the worker process with status 3", None, None]
    assert failures(pool, "fine") == [None]


def test_a_worker_killed_while_idle_costs_nothing_but_its_replacement():
    with RewardPool(OBEY, num_workers=1, timeout_s=1.0) as pool:
        process = pool._workers[0].process
        process.kill()
        process.wait()
        assert failures(pool, "fine", "fine")[1:] == [None]
        assert pool._workers[0].process.pid != process.pid


def test_what_a_reward_prints_stays_out_of_the_verdicts(pool, capfd):
    assert failures(pool, "print 3000000", "fine") == [None, None]
    assert capfd.readouterr().out == ""


def test_the_clock_of_a_row_starts_when_a_worker_takes_it(pool):
    assert failures(pool, *["sleep 0.4"] * 6) == [None] * 6


def test_a_kill_takes_along_what_the_row_started(pool, tmp_path):
    told = tmp_path / "pids"
    assert failures(pool, f"child {told}") == ["took longer than 1 s"]
    assert all(gone(int(pid)) for pid in told.read_text().split())


def test_close_ends_the_workers_and_a_closed_pool_says_so():
    pool = RewardPool(OBEY, num_workers=2, timeout_s=1.0)
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    assert all(gone(pid, 0.5) for pid in pids)
    with pytest.raises(WorkerError, match="closed"):
        pool.grade(["fine"], [""])


def test_a_pool_that_is_dropped_takes_its_workers_along():
    pool = RewardPool(OBEY, num_workers=1, timeout_s=1.0)
    pid = pool._workers[0].process.pid
    del pool
    gc.collect()
    assert gone(pid, 0.5)


@pytest.mark.parametrize("rest", ["", "hang", "hang-in-c"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path, rest):
    """A plain script, without a main guard, killed while its worker is idle or busy."""
    told = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from gtpo_megatron.rewards.pool import RewardPool\n"
        f"pool = RewardPool({OBEY!r}, num_workers=1, timeout_s=2.0 if {rest == 'hang-in-c'} else 60.0)\n"
        f"pool.grade(['tell-pid {told}'], [''])\n"
        f"pool.grade([{rest!r}], [''])\n"
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
        RewardPool("tests.unit.rewards.reward_functions:ecko", num_workers=2, timeout_s=1.0)


def test_a_module_that_kills_its_worker_is_a_worker_error(tmp_path, monkeypatch):
    (tmp_path / "deadly_reward_module.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"did not start.*status 7"):
        RewardPool("deadly_reward_module:f", num_workers=1, timeout_s=1.0)


@pytest.mark.parametrize("wrong", [{"num_workers": 0, "timeout_s": 1.0}, {"num_workers": 1, "timeout_s": 0.0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least 1 worker"):
        RewardPool(OBEY, **wrong)
