"""Workers made by a server, without Ray: a script of the test's own takes the place of Ray's worker."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.orchestration.on_ray import dashboard_agent, worker_servers, worker_setup
from gtpo_megatron.orchestration.on_ray.environment import engine_variables, rank_variables, reward_variables
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, place_run
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers
from gtpo_megatron.orchestration.on_ray.worker_setup import SERVER
from recipes import tiny_cpu

WORKER = """\
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv[1:], "name": __name__, "imported": "wave" in sys.modules, "folder": os.getcwd(),
    "variables": dict(os.environ), "parent": os.getppid(), "leads": os.getpgrp() == os.getpid(),
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "read": sys.stdin.read(),
}))
"""


@pytest.fixture
def scripts(tmp_path):
    """Stands for Ray's folder of scripts: the worker's, and the one that starts it."""
    (tmp_path / "default_worker.py").write_text(WORKER, encoding="utf-8")
    (tmp_path / "setup_worker.py").write_text("import sys; print('by Ray', sys.argv[1:])", encoding="utf-8")
    return tmp_path


@pytest.fixture
def servers():
    folder = Path(worker_servers.tempfile.mkdtemp(prefix="gtpo-", dir="/tmp"))
    servers = WorkerServers(folder)
    yield servers
    servers.end()
    shutil.rmtree(folder)


def ask(scripts, variables):
    """Output of what the raylet runs for a worker."""
    context = json.dumps({"env_vars": variables, "py_executable": "python"})
    given = [f"{worker_setup._CONTEXT}{context}", f"{worker_setup._LANGUAGE}PYTHON", f"{scripts}/default_worker.py"]
    command = [sys.executable, worker_setup.__file__, *given, "--node-ip-address=127.0.0.1"]
    return subprocess.run(
        command, input="its input", capture_output=True, text=True, cwd=scripts, timeout=60, check=True
    ).stdout


def test_a_worker_is_as_if_it_had_been_started_for_itself(scripts, servers):
    servers.start(["wave"], {"OMP_NUM_THREADS": "1"})
    (server,) = servers._servers
    for number in ("1", "2"):
        given = {"OMP_NUM_THREADS": "1", "NUMBER": number, SERVER: servers.address_for({"OMP_NUM_THREADS": "1"})}
        made = json.loads(ask(scripts, given))
        variables = made.pop("variables")
        assert made == {
            "arguments": ["--node-ip-address=127.0.0.1"],
            "name": "__main__",
            "imported": True,
            "folder": str(scripts),
            "parent": server.process.pid,
            "leads": True,
            "term": True,
            "read": "its input",
        }
        assert given.items() <= variables.items()
    os.kill(server.process.pid, 0)  # a worker's end is not its server's


@pytest.mark.parametrize("state", ["none", "gone", "cannot import"])
def test_without_a_server_it_is_started_by_ray(scripts, servers, state):
    variables = {"OMP_NUM_THREADS": "1"}
    if state != "none":
        servers.start(["wave" if state == "gone" else "no_such_module"], variables)
        variables[SERVER] = servers.address_for(variables)
    if state == "gone":
        servers.end()
    assert ask(scripts, variables).startswith("by Ray ['--serialized-runtime-env-context=")


DRIVER = """\
import sys, time
from pathlib import Path
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers
servers = WorkerServers(Path(sys.argv[1]))
servers.start(["wave"], {})
print(servers._servers[0].process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_a_driver_that_is_killed(tmp_path):
    folder = Path(worker_servers.tempfile.mkdtemp(prefix="gtpo-", dir="/tmp"))
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True)
    server = int(driver.stdout.readline())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 60
    while (folder.exists() or Path(f"/proc/{server}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert not Path(f"/proc/{server}").exists()


def test_servers_are_for_the_variables_of_the_run_s_processes(monkeypatch):
    started = []
    monkeypatch.setattr(worker_servers.subprocess, "Popen", lambda *_, **__: started.append(0))
    monkeypatch.setattr(WorkerServers, "end", lambda _: None)
    config = tiny_cpu.gtpo()
    placement = place_run(config, [ClusterNode(node_id="a", host="b", num_gpus=0, num_cpus=2)])
    with worker_servers.worker_servers(config) as servers:
        engine = servers.address_for(engine_variables(config, placement, 0))
        rank = servers.address_for(rank_variables(config, has_gpus=False))
        assert Path(engine).parent == Path(rank).parent
        assert rank == servers.address_for(reward_variables(has_gpus=False)) != engine
        assert servers.address_for(rank_variables(config, has_gpus=True)) == ""
        more = dataclasses.replace(config, cluster=ClusterConfig(threads_per_rank=2))
        assert servers.address_for(rank_variables(more, has_gpus=False)) == "", "threads are read when torch is loaded"
    assert not Path(engine).parent.exists()
    wider = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tensor_parallel_size=2))
    placement = place_run(wider, [ClusterNode(node_id="a", host="b", num_gpus=0, num_cpus=2)])
    with worker_servers.worker_servers(wider) as servers:
        assert servers.address_for(engine_variables(wider, placement, 0)) == "", "its workers import for themselves"
        assert servers.are_there


@pytest.mark.parametrize("cluster", [ClusterConfig(address="10.0.0.1:6379"), ClusterConfig(mode="local")])
def test_there_are_none_where_no_raylet_of_the_run_would_ask(monkeypatch, cluster):
    config = dataclasses.replace(tiny_cpu.gtpo(), cluster=cluster, parallel=ParallelConfig(num_ranks=1))
    with worker_servers.worker_servers(config) as servers:
        assert not servers.are_there


def test_the_dashboard_agent_says_that_it_has_no_ports_and_ends_with_its_raylet(tmp_path):
    script = f'"{sys.executable}" -IS "$0" agent.py --node-id=ab --session-dir="$1" --more=1 & echo $!; read'
    raylet = subprocess.Popen(
        ["bash", "-c", script, dashboard_agent.__file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    agent = int(raylet.stdout.readline())
    deadline = time.monotonic() + 30
    expected = sorted(f"{name}_ab" for name in dashboard_agent.PORTS)
    while sorted(path.name for path in tmp_path.iterdir()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(expected, "-1")
    assert Path(f"/proc/{agent}").exists()
    raylet.communicate("\n")
    while Path(f"/proc/{agent}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{agent}").exists()
