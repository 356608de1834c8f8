"""An engine whose workers are on two nodes samples what one on one node does; a worker that dies there is noticed."""

import os
import re
import secrets
import signal

import psutil
import pytest

from tests.integration.ray_nodes import ray_of_nodes
from tests.integration.runs import Run, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("a Ray of somebody else's"),
    pytest.mark.filterwarnings("ignore"),  # of TensorBoard's readers
]

ON_BOTH = ("--rollout.nodes-per-engine", "2")
STAGES = (*ON_BOTH, "--rollout.pipeline-parallel-size", "2")
ROUNDED = ("off_policy/", "sync/logprob")
"""Metrics of the log-probs' last bits, which depend on the order of sums over workers."""


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Address of a Ray of two nodes on this machine."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        environment.setenv("RAY_worker_niceness", "0")  # as of a Ray of a run's own
        with ray_of_nodes(tmp_path_factory.mktemp("ray"), 2) as head:
            deadline = ("--cluster.start-deadline-s", "600")  # a machine of two cores imports vLLM four times at once
            yield ("--cluster.address", head, "--cluster.num-nodes", "2", *deadline)


@pytest.fixture(scope="module")
def one_node(two_nodes, tmp_path_factory):
    """What a run computes there whose engine is one process."""
    run = Run(tmp_path_factory.mktemp("one") / "run", *two_nodes)
    run.succeed()
    return computed(run)


def computed(run):
    return [{name: row[name] for name in row if not name.startswith(ROUNDED)} for row in steps(run.folder)]


def log_of(run):
    return (run.folder / "log.txt").read_text()


@pytest.mark.nightly
def test_workers_that_share_layers_over_two_nodes(one_node, two_nodes, tmp_path):
    """Pushes are verified by checksums. A worker on the second node is killed, and the engine replaced on both."""
    run = Run(tmp_path / "run", *two_nodes, *ON_BOTH, "--rollout.tensor-parallel-size", "2")
    run.wait_for("step 1/2")
    (follower,) = re.findall(r"\[engine node 1\].* process (\d+) has the workers of node 1", log_of(run))
    family = psutil.Process(int(follower)).children(recursive=True)
    (worker,) = [child for child in family if not any("resource_tracker" in part for part in child.cmdline())]
    os.kill(worker.pid, signal.SIGKILL)
    run.succeed()
    log = log_of(run)
    assert "checksums agree on both sides, for 2 workers" in run.output
    assert "a worker of this engine died on this node; the engine ends with it" in log
    assert log.count("will be replaced") == 1
    assert len(re.findall("has the workers of node 1", log)) == 2
    assert not psutil.pid_exists(int(follower))
    assert computed(run) == one_node


@pytest.mark.nightly
def test_stages_on_two_nodes(one_node, two_nodes, tmp_path):
    """Each worker is sent the layers that it has; a dead driver leaves nothing, on the second node either."""
    run = Run(tmp_path / "run", *two_nodes, *STAGES)
    run.wait_for("step 2/2")
    run.succeed()
    assert "checksums agree on both sides, for 2 workers" in run.output
    assert computed(run) == one_node
    killed = Run(tmp_path / "killed", *two_nodes, *STAGES, num_steps=30)
    killed.wait_for("step 1/30")
    (follower,) = re.findall(r"\[engine node 1\].* process (\d+) has the workers of node 1", log_of(killed))
    family = [psutil.Process(int(follower)), *psutil.Process(int(follower)).children(recursive=True)]
    killed.kill()
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left
