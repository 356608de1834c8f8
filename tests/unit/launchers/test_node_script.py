"""What the node script makes of signals, on two nodes whose Python is a stand-in for Ray and the driver."""

import os
import shlex
import signal
import subprocess
import time

import pytest

from launchers.job_folder import SCRIPTS

PYTHON = """\
#!/bin/bash
case "$*" in
*node_network.py*) echo "127.0.0.1 lo 6379" ;;
*ray.scripts.scripts*)
  while [[ -e $LAUNCH_DIR/slow ]]; do sleep 0.05; done
  echo "Ray runtime started"
  trap 'exit 0' TERM
  while :; do sleep 0.05; done ;;
*gtpo_megatron.cli*)
  trap 'asked=1' TERM
  touch "$LAUNCH_DIR/driving"
  until [[ -n $asked ]]; do sleep 0.05; done
  touch "$LAUNCH_DIR/saving"
  until [[ -e $LAUNCH_DIR/saved ]]; do sleep 0.05; done
  exit 75 ;;
esac
"""


@pytest.fixture
def start(tmp_path):
    """Starts the node script on a node; only this process is signalled, as Slurm's cgroup plugin does it."""
    launch, python, started = tmp_path / "launch", tmp_path / "python", []
    launch.mkdir()
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    settings = {
        **dict.fromkeys(("RUN_DIR", "LAUNCH_DIR", "LOG_DIR", "SUBMIT_DIR"), launch),
        **{"CONFIG": launch / "config.yaml", "PYTHON": python, "IMAGE": "", "NETWORK_INTERFACE": ""},
        **{"GPUS_PER_NODE": 0, "RAY_CPUS": 1, "OBJECT_STORE_BYTES": 1, "RAY_PORT": 0, "START_DEADLINE_S": 20},
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    (launch / "settings.sh").write_text("\n".join(lines), encoding="utf-8")

    def start(node):
        slurm = {"SLURM_NODEID": str(node), "SLURM_JOB_ID": f"t{os.getpid()}", "SLURM_NNODES": "2"}
        with (launch / f"out.{node}").open("w") as output:
            process = subprocess.Popen(
                ["bash", str(SCRIPTS / "node.sh"), str(launch / "settings.sh")],
                env={"PATH": "/usr/bin:/bin", **slurm},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    start.launch = launch
    yield start
    for process in started:
        process.kill()
        process.wait(20)


def until(condition):
    """Waits for 20 s at most."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_a_node_that_is_told_to_end_waits_until_the_driver_has_saved(start):
    """A preemption's TERM comes to all nodes; the driver needs the ranks of all of them to save."""
    head, worker = start(0), start(1)
    until((start.launch / "driving").exists)
    until(lambda: list(start.launch.glob("ray-*-node1.log")))  # it listens to signals by then
    for process in (head, worker):
        process.send_signal(signal.SIGTERM)
    until((start.launch / "saving").exists)
    time.sleep(1.0)  # twice what the worker sleeps between two looks
    assert (head.poll(), worker.poll()) == (None, None)
    assert len(list(start.launch.glob("told.*.0"))) == 1, "named by the attempt"
    (start.launch / "saved").touch()
    assert head.wait(20) == 75
    assert worker.wait(20) == 0
    assert "the driver ended with status 75" in (start.launch / "out.0").read_text()


def test_a_head_that_is_told_to_end_before_its_driver_starts_none(start):
    (start.launch / "slow").touch()
    head, worker = start(0), start(1)
    until(lambda: list(start.launch.glob("ray-*")))
    head.send_signal(signal.SIGTERM)
    assert head.wait(20) == 75
    assert "told to end before the driver was started" in (start.launch / "out.0").read_text()
    assert worker.wait(20) == 0
    assert not (start.launch / "driving").exists()
