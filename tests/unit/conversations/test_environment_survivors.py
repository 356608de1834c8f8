"""Nothing of an environment's worker outlives its pool."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.supervision.process_tree import process_ids
from tests.unit.conversations.test_environment_pool import HERE, opened, pool_of, say
from tests.unit.rewards.test_reward_pool import gone, session_of

ROOT = Path(__file__).resolve().parents[3]


def test_a_pool_that_is_dropped_takes_its_workers_along():
    pool = pool_of("Echo")
    [pid] = pool.process_ids
    del pool
    gc.collect()
    assert gone(pid, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["daemon", "daemon-and-die", "daemon-and-hang"])
def test_no_child_survives_whatever_session_it_made(tmp_path, how):
    told = tmp_path / "pid"
    with pool_of("Obedient", timeout_s=3.0) as pool:
        opened(pool, 1)
        say(pool, e1=f"{how} {told}")
    assert gone(int(told.read_text()), within_s=0.5)


def test_no_process_survives_that_forks_and_ends_faster_than_one_can_look(tmp_path):
    told = tmp_path / "session"
    with pool_of("Obedient") as pool:
        opened(pool, 1)
        assert "status -9" in say(pool, e1=f"flee {told}")[1].failure
        opened(pool, 1)
        session = int(told.read_text())
        for _ in range(50):
            assert not [pid for pid in process_ids() if session_of(pid) == session]


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["fine", "sleep 60", "hang-in-c"])
def test_nothing_survives_a_parent_that_is_killed(tmp_path, rest):
    """A plain script without a main guard, killed while its worker is idle or busy."""
    told = tmp_path / "pids"
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from gtpo_megatron.conversations.environment_pool import EnvironmentPool\n"
        "from gtpo_megatron.conversations.messages import Message\n"
        "from gtpo_megatron.supervision.process_tree import descendants\n"
        f"pool = EnvironmentPool('{HERE}:Obedient', num_workers=1, timeout_s=60.0, memory_limit_mib=0)\n"
        "pool.open(1, {'prompt': 'fine'})\n"
        "pool.open(2, {'prompt': 'fine'})\n"
        "num = len(pool.poll(30)) + len(pool.poll(1))\n"
        f"pool.step(1, Message(role='assistant', content='daemon {tmp_path / 'daemon'}'))\n"
        "pool.poll(30)\n"
        f"pool.step(2, Message(role='assistant', content='{rest}'))\n"
        "pool.poll(1)\n"
        f"open('{told}', 'w').write(' '.join(map(str, (*pool.process_ids, *descendants(pool.process_ids[0])))))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    pids = [int(pid) for pid in told.read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if not gone(pid, within_s=8.0)] == []
