import os
import subprocess
import sys
from pathlib import Path

from tests.unit.rewards.test_reward_pool import gone

ROOT = Path(__file__).resolve().parents[3]

WORKER = """
import json, os, sys, time
def main():
    if os.fork() == 0:
        os.setsid()
        os.execlp("sleep", "sleep", "60")
    os.write(json.loads(sys.argv[1])["descriptor"], b"x")
    time.sleep(60)
"""

PARENT = """
import os, signal, socket, sys
from gtpo_megatron.supervision.process_tree import descendants
from gtpo_megatron.supervision.supervised_process import SupervisedProcess
ours, theirs = socket.socketpair()
process = SupervisedProcess("worker_with_a_daemon", {}, descriptor=theirs.fileno(), what="the worker")
ours.recv(1)
worker, *_ = everyone = descendants(process.supervisor_id)
print(process.supervisor_id, *everyone, flush=True)
os.kill(worker, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_survives_a_killed_parent_whose_worker_is_stopped(tmp_path):
    """The kernel then sends SIGHUP to the group of supervisor and worker; the supervisor must live to end the rest.

    The same happens by chance to a worker that runs: its supervisor stops it before the parent counts as ended.
    """
    (tmp_path / "worker_with_a_daemon.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    assert [pid for pid in pids if not gone(pid, within_s=8.0)] == []
