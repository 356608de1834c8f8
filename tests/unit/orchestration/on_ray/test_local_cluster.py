"""What a Ray of the run's own is started with; Ray itself is started in ``tests/integration/test_network.py``."""

import os
import signal
import sys

import pytest

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray import cluster
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
