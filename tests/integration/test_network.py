"""What a real run listens on, and what protects what it cannot keep to itself."""

import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launchers.own_settings import SCRIPT_NAMES, SCRIPTS
from tests.integration.listeners import (
    EVERYWHERE,
    Listener,
    answer_without_token,
    family,
    listeners,
    seen_until_the_end,
)
from tests.integration.runs import Run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of TensorBoard's readers
]

NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
WRONG_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ON_THE_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Else Ray makes the network's address of the loopback's, at which nobody listens."""

CONNECT = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("connected to", len(ray.nodes()), "node")
"""


def connect(address, **environment):
    """What a driver of somebody else's gets at an address of Ray's; Ray tries for a minute."""
    done = subprocess.run(
        ["timeout", "100", sys.executable, "-c", CONNECT, address],
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_run_on_this_machine_listens_on_the_loopback_only(tmp_path, monkeypatch):
    """Two ranks, an engine over two workers, Ray: from the start to the end, and what a stranger gets on the way."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    run = Run(tmp_path / "run", "--rollout.tensor-parallel-size", "2", "--evaluation.every-steps", "0", num_steps=1)
    folders, strangers = {}, []

    def look(processes):
        for folder in {folder for process in processes for folder in ray_folders(process)}:
            status = folder.stat()
            folders[folder] = (stat.S_IMODE(status.st_mode), status.st_uid)
        gcs = next((found for found in listeners(processes) if found.kind == "GCS"), None)
        if gcs and not strangers and "rank 0: process" in run.output:
            strangers.append(answer_without_token("127.0.0.1", gcs.port))
            strangers.append(connect(f"127.0.0.1:{gcs.port}", **WRONG_TOKEN, **ON_THE_LOOPBACK))

    seen = seen_until_the_end(run.process, look)
    assert run.process.returncode == 0, run.output[-3000:]
    assert {found.kind for found in seen} >= {"GCS", "raylet", "agent", "worker"}
    assert not [found for found in seen if found.is_reachable]
    refused, stranger = strangers
    assert refused == "refused"
    assert "connected" not in stranger
    assert "AuthenticationError" in stranger
    assert set(folders.values()) == {(0o700, os.getuid())}, "Ray's sockets and logs"
    assert not any(folder.exists() for folder in folders)
    assert not (home / ".ray").exists(), "a token of the run's own, which nobody can read"


def ray_folders(process):
    """Private folders of ours that a process is told of."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return
    for word in words:
        if found := re.search(r"(/[^=]*/gtpo-[^/]+)/ray/session_", word):
            yield Path(found[1])


ALL_OF_RAY = {"GCS", "raylet", "agent", "runtime environment agent"}

OPEN_TO_ALL = {"dashboard"}
"""Processes of Ray whose port answers anybody: counters of its own (Prometheus), nothing of the run.

The port is one for all of a machine's clusters: the second has no such listener.
"""

PYTHON = """\
#!/bin/bash
[[ "$*" == *gtpo_megatron.cli* ]] || exec {python} "$@"
touch "$LAUNCH_DIR/driving"
until [[ -e $LAUNCH_DIR/stop ]]; do sleep 0.1; done
"""


def network_address():
    """Interface and address by which other machines reach this one."""
    for name, found in psutil.net_if_addrs().items():
        for address in found:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return name, address.address
    pytest.skip("this machine has no network")


@pytest.fixture
def node(tmp_path):
    """Node 0 of a job on two nodes, as Slurm would start it, with a driver that waits."""
    interface, address = network_address()
    token = secrets.token_hex(32)
    for name in SCRIPT_NAMES:
        shutil.copyfile(SCRIPTS / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=shlex.quote(sys.executable)), encoding="utf-8")
    python.chmod(0o755)
    settings = {
        **dict.fromkeys(("RUN_DIR", "LAUNCH_DIR", "LOG_DIR", "SUBMIT_DIR"), tmp_path),
        **{"CONFIG": "none", "PYTHON": python, "IMAGE": "", "NETWORK_INTERFACE": interface, "GPUS_PER_NODE": 0},
        **{"RAY_CPUS": 1, "OBJECT_STORE_BYTES": 100 << 20, "RAY_PORT": 0, "START_DEADLINE_S": 300},
        "SUBMIT_COMMIT": "5e0c1d2b3a4f",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()] + ["JOB_ENV=()"]
    (tmp_path / "settings.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    job_id = f"t{os.getpid()}"
    slurm = {"SLURM_NODEID": "0", "SLURM_JOB_ID": job_id, "SLURM_NNODES": "2"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            ["bash", str(tmp_path / "node.sh"), str(tmp_path / "settings.sh")],
            env={"PATH": os.environ["PATH"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **slurm},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 300
    while not (tmp_path / "driving").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (tmp_path / "driving").exists(), (tmp_path / "out").read_text()
    yield process, address, token, (tmp_path / f"head.{job_id}.0").read_text().strip()
    (tmp_path / "stop").touch()
    assert process.wait(60) == 0


def test_a_job_on_several_machines_asks_for_its_token_wherever_it_can_be_reached(node):
    """Ray cannot listen on one network alone: it is the loopback or all of them, and a token is what protects it."""
    process, address, token, head = node
    deadline, seen = time.monotonic() + 120, set()
    while not {found.kind for found in seen} >= ALL_OF_RAY and time.monotonic() < deadline:
        time.sleep(1)  # its agents come up after it says that it has started
        seen = listeners(family(process))
    assert {found.kind for found in seen} >= ALL_OF_RAY
    time.sleep(3)
    seen = listeners(family(process))
    assert head.startswith(f"{address}:")
    assert "client server" not in {found.kind for found in seen}, "nobody needs it, and its port is one for all jobs"
    answers = {found: answer_of(found, address) for found in seen if found.is_reachable}
    assert {found.kind for found, answer in answers.items() if answer != "refused"} <= OPEN_TO_ALL, answers
    print(*sorted((*map(str, item),) for item in answers.items()), sep="\n")

    assert "connected to 1 node" in connect(head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    assert "connected" not in connect(head, **NO_TOKEN)
    refused = connect(head, **WRONG_TOKEN)
    assert "connected" not in refused
    assert "AuthenticationError" in refused


def answer_of(found: Listener, address: str) -> str:
    return answer_without_token(address if found.ip in EVERYWHERE else found.ip, found.port)
