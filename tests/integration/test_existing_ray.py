"""Runs on a Ray that somebody else has started: used, not ended; and what is said where it is not there."""

import os
import secrets
import signal

import pytest

from gtpo_megatron.companions.status import read_status
from tests.integration.ray_nodes import ray_of_nodes
from tests.integration.runs import Run, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("a Ray of somebody else's"),
    pytest.mark.filterwarnings("ignore"),  # of TensorBoard's readers
]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Address of a head on this machine, which asks for a token."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with ray_of_nodes(tmp_path_factory.mktemp("ray"), 1) as address:
            yield address


def test_a_run_there_that_is_asked_to_stop(head, tmp_path):
    run = Run(tmp_path / "run", "--cluster.address", head, "--evaluation.every-steps", "0", num_steps=30)
    run.wait_for(r"step 1/30")
    assert read_status(run.folder).state == "running"
    (run.folder / "stop_requested").write_text("the test\n", encoding="utf-8")
    assert run.wait() == 75, run.output[-3000:]
    status = read_status(run.folder)
    assert (status.state, status.checkpoint_step) == ("stopped", steps(run.folder)[-1]["step"])
    assert status.step < 30
    assert "stopped after step" in run.output
    assert "the test" in run.output
    assert not (run.folder / "stop_requested").exists()


def test_a_run_that_is_told_to_end_while_its_processes_start(head, tmp_path):
    """There is no step to finish: it leaves with the status of a stop, and measures nothing first."""
    run = Run(tmp_path / "run", "--cluster.address", head)
    run.pid_of("rank 0")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 75, run.output[-3000:]
    status = read_status(run.folder)
    assert (status.state, status.step, status.checkpoint_step) == ("stopped", 0, None)
    assert "before: held-out" not in run.output


def test_nodes_that_never_join(head, tmp_path):
    run = Run(
        tmp_path / "run",
        *("--cluster.address", head, "--cluster.num-nodes", "2", "--cluster.start-deadline-s", "2"),
    )
    assert run.wait() == 1
    assert "1 of cluster.num_nodes=2 nodes have joined" in run.output.splitlines()[-1]


def test_a_dead_head(tmp_path):
    run = Run(tmp_path / "run", "--cluster.address", "127.0.0.1:1")
    assert run.wait(250) == 1  # not only at ``start_deadline_s=300``
    last = run.output.splitlines()[-1]
    assert "the Ray head at cluster.address='127.0.0.1:1' does not answer: " in last
    assert "Connection refused" in last
