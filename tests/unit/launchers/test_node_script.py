"""What the node script makes of signals, on two nodes whose Python is a stand-in for Ray and the driver."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launchers.job_folder import SCRIPTS

PYTHON = """\
#!/bin/bash
whole() {  # a file that is there is whole
  cat > "$LAUNCH_DIR/.$1.$SLURM_NODEID"
  mv "$LAUNCH_DIR/.$1.$SLURM_NODEID" "$LAUNCH_DIR/$1.$SLURM_NODEID"
}
case "$*" in
*node_network.py*)
  printf '%s\n' "$@" | whole network
  echo "ERROR: ld.so: object 'libmine.so' cannot be preloaded: ignored." >&2
  [[ -z $NO_ADDRESS ]] || { echo "node0 has no address" >&2; exit 1; }
  echo "a library greets"
  echo "network 127.0.0.1 ${INTERFACE-lo} 6379" ;;
*ray.scripts.scripts*)
  while [[ -e $LAUNCH_DIR/slow ]]; do sleep 0.05; done
  for word; do
    [[ $word == --temp-dir=* ]] || continue
    stat -c '%a %u' "$(dirname "${word#*=}")" > "$LAUNCH_DIR/folder.$SLURM_NODEID"
  done
  { printf '%s\n' "$@"; env; } | whole ray
  echo "Ray runtime started"
  trap 'exit 0' TERM
  while :; do sleep 0.05; done ;;
*provenance*) echo "$COMMIT_NOW" ;;
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
        **{
            "SUBCOMMAND": "train",
            "CONFIG": launch / "config.yaml",
            "PYTHON": python,
            "IMAGE": "",
            "NETWORK_INTERFACE": "",
        },
        **{"GPUS_PER_NODE": 0, "RAY_CPUS": 1, "OBJECT_STORE_BYTES": 1, "RAY_PORT": 0, "START_DEADLINE_S": 20},
        "SUBMIT_COMMIT": "5e0c1d2b3a4f",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    (launch / "settings.sh").write_text("\n".join(lines), encoding="utf-8")

    def start(node, *, num_nodes=2, token="t0ken", **variables):
        slurm = {"SLURM_NODEID": str(node), "SLURM_JOB_ID": f"t{os.getpid()}", "SLURM_NNODES": str(num_nodes)}
        slurm |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        with (launch / f"out.{node}").open("w") as output:
            process = subprocess.Popen(
                ["bash", str(SCRIPTS / "node.sh"), str(launch / "settings.sh")],
                env={"PATH": "/usr/bin:/bin", **slurm, **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    start.launch = launch
    yield start
    for process in started:
        process.kill()
        process.wait(60)


def until(condition):
    """Waits for a minute at most: on a loaded machine a shell needs seconds to start."""
    deadline = time.monotonic() + 60
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
    assert head.wait(60) == 75
    assert worker.wait(60) == 0
    assert "the driver ended with status 75" in (start.launch / "out.0").read_text()


def test_a_head_that_is_told_to_end_before_its_driver_starts_none(start):
    (start.launch / "slow").touch()
    head, worker = start(0), start(1)
    until(lambda: list(start.launch.glob("ray-*")))
    head.send_signal(signal.SIGTERM)
    assert head.wait(60) == 75
    assert "told to end before the driver was started" in (start.launch / "out.0").read_text()
    assert worker.wait(60) == 0
    assert not (start.launch / "driving").exists()


def test_rays_folder_is_private_has_a_name_nobody_foresees_and_goes_with_the_job(start):
    """Ray opens the folder that it is given to everybody (mode 777), and has its sockets in it."""
    (start.launch / "slow").touch()
    processes, folders = [start(0), start(1, TORCHINDUCTOR_CACHE_DIR="/own/inductor")], []
    (start.launch / "slow").unlink()
    for node in (0, 1):
        until((start.launch / f"ray.{node}").exists)
        told = (start.launch / f"ray.{node}").read_text().splitlines()
        folders.append(Path(next(word for word in told if word.startswith("--temp-dir=")).partition("=")[2]).parent)
        assert (start.launch / f"folder.{node}").read_text() == f"700 {os.getuid()}\n"
        variables = dict(word.split("=", 1) for word in told if "=" in word)
        assert variables["RAY_worker_niceness"] == "0"
        # 64 ranks that compile at once would fight over one home
        assert variables["TRITON_CACHE_DIR"] == f"{folders[-1]}/triton"
        assert variables["VLLM_CACHE_ROOT"] == f"{folders[-1]}/vllm"
        assert variables["TORCHINDUCTOR_CACHE_DIR"] == ("/own/inductor" if node else f"{folders[-1]}/inductor")
    assert folders[0] != folders[1]
    assert not any(f"t{os.getpid()}" in str(folder) for folder in folders), "the job's number is known to all"
    until((start.launch / "driving").exists)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    (start.launch / "saved").touch()
    assert [process.wait(60) for process in processes] == [75, 0]
    assert not any(folder.exists() for folder in folders)


def test_a_job_on_one_node_stays_on_the_loopback(start):
    head = start(0, num_nodes=1)
    until((start.launch / "driving").exists)
    assert (start.launch / "network.0").read_text().splitlines()[1:] == ["", "127.0.0.1", "0"]
    environment = (start.launch / "ray.0").read_text().splitlines()
    assert {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME==lo"} <= {*environment}
    (start.launch / "saved").touch()
    head.send_signal(signal.SIGTERM)
    assert head.wait(60) == 75


@pytest.mark.parametrize("interface", ["lo", ""])
def test_lines_of_a_library_are_not_taken_for_the_address(start, interface):
    """What LD_PRELOAD cannot find is said on stderr by every program; an address may be that of no interface."""
    head = start(0, INTERFACE=interface)
    until((start.launch / "driving").exists)
    told = (start.launch / "ray.0").read_text().splitlines()
    assert {"--node-ip-address=127.0.0.1", "--port=6379"} <= {*told}
    assert [line for line in told if line.startswith("GLOO_")] == (
        [f"GLOO_SOCKET_IFNAME={interface}"] * bool(interface)
    )
    (start.launch / "saved").touch()
    head.send_signal(signal.SIGTERM)
    assert head.wait(60) == 75


UNKNOWN = "unknown (not a git checkout)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("now", "is_told"), [("5e0c1d2b3a4f", False), ("5e0c1d2b3a4f-dirty", True), (UNKNOWN, False), ("", False)]
)
def test_a_package_at_another_commit_than_at_the_submission_is_told(start, now, is_told):
    head = start(0, COMMIT_NOW=now)
    until((start.launch / "driving").exists)
    told = "at commit 5e0c1d2b3a4f-dirty now; at the submission it was at 5e0c1d2b3a4f\n"
    assert (told in (start.launch / "out.0").read_text()) == is_told
    (start.launch / "saved").touch()
    head.send_signal(signal.SIGTERM)
    assert head.wait(60) == 75


def test_a_node_without_an_address_says_why(start):
    head = start(0, NO_ADDRESS="1")
    assert head.wait(60) == 91
    *_, why, conclusion = (start.launch / "out.0").read_text().splitlines()
    assert why == "node0 has no address"
    assert conclusion.endswith("no address for Ray, see the line above")


def test_without_its_token_no_ray_is_started(start):
    """As it was where a site keeps the environment from the nodes."""
    head = start(0, num_nodes=1, token="")
    assert head.wait(60) == 95
    assert "token for Ray has not come to this node" in (start.launch / "out.0").read_text()
    assert not (start.launch / "ray.0").exists()
