"""What a Ray of the run's own is started with; Ray itself is started in ``tests/integration/test_network.py``."""

import os
import signal
import sys

import pytest

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray import cluster, dashboard_agent, worker_setup
from gtpo_megatron.orchestration.on_ray.cluster import join_cluster
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.local_cluster import start_own_ray
from tests.chaos.campaign import NOT_UP


@pytest.fixture
def started(monkeypatch):
    """What ``ray.init`` was told, call by call, and what was in the environment then."""
    import ray
    from ray._private import ray_constants

    calls = []
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "known to all"})
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append((options, dict(os.environ))))
    return calls


def test_the_environment_that_its_processes_inherit(started, tmp_path):
    from ray._private import ray_constants

    for _ in range(2):
        start_own_ray(ClusterConfig(), tmp_path, deadline=Deadline(60.0), log_to_driver=False)
    (options, environment), (_, again) = started
    assert options["address"] == "local"
    assert options["_temp_dir"] == f"{tmp_path}/ray", "Ray opens the folder that it is given to everybody"
    assert options["log_to_driver"] is False
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert not ray_constants.ENABLE_RAY_CLUSTER, "it was imported before"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "RAY_AUTH_MODE" not in environment, "Ray turns its token on where nobody has said anything"
    assert len({environment["RAY_AUTH_TOKEN"], again["RAY_AUTH_TOKEN"], "known to all"}) == 3
    assert len(environment["RAY_AUTH_TOKEN"]) == 64


def test_a_ray_that_is_not_up_in_time_is_one_line(started, tmp_path, monkeypatch):
    import ray

    def times_out(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", times_out)
    with pytest.raises(WorkerError, match=r"the Ray head of this run does not answer: .*The .* load") as told:
        join_cluster(ClusterConfig(), deadline=Deadline(1.0), temp_folder=tmp_path)
    assert NOT_UP in str(told.value), "the chaos suite knows it by that"


def test_an_error_of_another_class_is_not_taken_for_it(started, tmp_path, monkeypatch):
    import ray

    def is_wrong(**_):
        raise KeyError("a bug")

    monkeypatch.setattr(ray, "init", is_wrong)
    with pytest.raises(KeyError, match="a bug"):
        start_own_ray(ClusterConfig(), tmp_path, deadline=Deadline(60.0))


def test_its_processes_are_in_groups_of_their_own_and_the_handler_of_sigterm_is_left(started, tmp_path, monkeypatch):
    """A signal to the group of the driver must not end Ray before the run has saved itself."""
    import ray
    from ray._private import services, utils

    seen = []

    def init(**_):
        utils.set_sigterm_handler(lambda *_: sys.exit(15))
        process = services.start_ray_process([sys.executable, "-c", "input()"], "raylet", True, pipe_stdin=True).process
        seen.append((os.getpgid(process.pid) == process.pid, os.getsid(process.pid)))
        process.communicate(b"\n")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "ray_nodes", lambda: [None])
    before = signal.getsignal(signal.SIGTERM)
    join_cluster(ClusterConfig(), deadline=Deadline(20.0), temp_folder=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert seen == [(True, os.getsid(0))]


@pytest.mark.parametrize("asks_servers", [False, True])
def test_nobody_watches_and_workers_are_made_by_servers_if_there_are_any(started, tmp_path, monkeypatch, asks_servers):
    import ray
    from ray._private import parameter, ray_constants, services

    seen = {}

    def init(**_):
        asked = parameter.RayParams()
        seen["parameters"] = (asked.no_monitor, asked.include_log_monitor, asked.setup_worker_path)
        seen["dashboard"] = services.start_api_server(False, False, "127.0.0.1")
        python = services._build_python_executable_command_memory_profileable
        seen["agents"] = [
            python(kind, str(tmp_path))
            for kind in (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
        ]
        seen["environment"] = dict(os.environ)

    before = (parameter.RayParams, services.start_api_server)
    monkeypatch.setattr(ray, "init", init)
    start_own_ray(ClusterConfig(), tmp_path, deadline=Deadline(61.5), asks_servers=asks_servers)
    assert seen["parameters"] == (True, False, worker_setup.__file__ if asks_servers else None)
    assert seen["dashboard"] == (None, None)
    assert seen["agents"] == [[sys.executable, "-IS", dashboard_agent.__file__], [sys.executable, "-u"]]
    assert seen["environment"]["RAY_prestart_worker_first_driver"] == "0"
    assert seen["environment"]["RAY_worker_register_timeout_seconds"] == "62", (
        "a server may import for longer than 60 s"
    )
    assert (parameter.RayParams, services.start_api_server) == before
