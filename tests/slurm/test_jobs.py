"""Real jobs on a real Slurm of two nodes: finished, failed, cancelled, stopped before the limit, robbed of a node."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from gtpo_megatron.companions.status import read_status
from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.slurm.cluster import Slurm, scontrol, steps

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400), pytest.mark.xdist_group("slurm")]

NUM_STEPS = 14
SAVES = ("--checkpoint.every-steps", "3", "--checkpoint.no-export-hf")


@pytest.fixture(scope="module")
def slurm():
    """Two nodes, each with its own address, /tmp and /dev/shm; what jobs share lies beside."""
    # nodes have a /tmp of their own, so pytest's is none that they share
    shared = Path(tempfile.mkdtemp(prefix="gs", dir="/var/tmp"))
    cluster = Slurm(shared)
    reason = cluster("check")
    if reason.returncode:
        shared.rmdir()
        pytest.skip(f"no local Slurm: {reason.stdout.strip()}")
    started = cluster("start", "2")
    assert started.returncode == 0, started.stderr
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster
    cluster.end()
    shutil.rmtree(shared)


def assert_nothing_is_left(launch):
    deadline = time.monotonic() + 30
    while (left := launch.processes()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def test_a_broken_run_equals_an_unbroken_one_beside_it(slurm):
    """Two jobs share both nodes. One is left alone; the other is warned and requeued, then loses a node."""
    whole = slurm.launch("whole", *SAVES, num_steps=NUM_STEPS)
    broken = slurm.launch("broken", *SAVES, num_steps=NUM_STEPS)

    # the warning before the time limit reaches the batch shell, as --signal=B:USR1 has it
    broken.until("its first step", lambda: broken.step >= 1)
    assert whole.state.name in ("RUNNING", "COMPLETED"), "both jobs are on the nodes at once"
    assert scontrol("show", "job", broken.job_id).stdout.count("NodeList=node[0-1]") >= 1
    scancel("--batch", "--signal=USR1", broken.job_id)
    broken.until_restart(1)
    stopped_at = broken.saved_step
    assert 1 <= stopped_at < NUM_STEPS
    assert "stopped after step" in broken.output

    # a job that is alone from here on: the other must not lose its node
    assert whole.wait() == 0, whole.output[-6000:]

    broken.until("a step after the restart", lambda: broken.step > stopped_at)
    slurm("pull", "node1")
    broken.until("Slurm to miss the node", lambda: broken.state.restarts >= 2 or broken.state.name != "RUNNING")
    slurm("boot", "node1")
    broken.until_restart(2)
    assert broken.wait() == 0, broken.output[-6000:]

    assert [row["step"] for row in steps(whole.run_dir)] == list(range(NUM_STEPS + 1))
    assert steps(broken.run_dir) == steps(whole.run_dir)
    assert_the_folder_is_whole(whole)
    assert len(list((broken.run_dir / "logs").glob("log-*_[0-9]*_*.out"))) >= 2, "a log for every restart"
    for launch in (whole, broken):
        assert launch.told.splitlines()[-1].startswith("finished; ")
        assert_nothing_is_left(launch)


def assert_the_folder_is_whole(launch):
    names = {path.name.split(".")[0] for path in launch.run_dir.iterdir()}
    assert names >= {
        "config",
        "data",
        "metrics",
        "events",
        "rollouts",
        "checkpoints",
        "report",
        "log",
        "launch",
        "logs",
    }
    log = (launch.run_dir / "log.txt").read_text(encoding="utf-8")
    assert "2 nodes have joined the Ray head at 10." in log
    assert "ranks on node0: 0; node1: 1; engines on node0" in log
    assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in steps(launch.run_dir)[1:])
    status = read_status(launch.run_dir)
    assert (status.state, status.step, status.checkpoint_step) == ("finished", NUM_STEPS, NUM_STEPS)
    assert status.driver.host == "node0"


def test_a_warm_start_of_two_nodes_that_is_warned_goes_on(slurm):
    launch = slurm.launch("warm", "--data.rows-per-step", "4", *SAVES, recipe="sft", num_steps=NUM_STEPS)
    launch.until("its first step", lambda: launch.step >= 1)
    scancel("--batch", "--signal=USR1", launch.job_id)
    launch.until_restart(1)
    assert 1 <= launch.saved_step < NUM_STEPS
    assert launch.wait() == 0, launch.output[-6000:]
    rows = read_metrics(launch.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == list(range(1, NUM_STEPS + 1))
    assert rows[-1]["sft/heldout_loss"] != rows[0]["sft/heldout_loss"]  # of so few rows it need not fall
    assert_nothing_is_left(launch)


def test_an_engine_whose_workers_are_on_both_nodes_ends_and_starts_on_both(slurm):
    """Each stage has its half of the layers and is sent it; nodes have addresses of their own, no common /dev/shm."""
    stages = ("--rollout.nodes-per-engine", "2", "--rollout.pipeline-parallel-size", "2")
    launch = slurm.launch("stages", *SAVES, *stages, num_steps=4)
    launch.until("its first step", lambda: launch.step >= 1)
    scancel("--batch", "--signal=USR1", launch.job_id)
    launch.until_restart(1)
    assert 1 <= launch.saved_step < 4
    assert launch.wait() == 0, launch.output[-6000:]
    rows = steps(launch.run_dir)
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["sync/logprob_gap_max"] <= 1e-4 for row in rows[1:])
    log = (launch.run_dir / "log.txt").read_text(encoding="utf-8")
    assert log.count("has the workers of node 1") == 2, "once for each start"
    assert "checksums agree on both sides, for 2 workers" in launch.output
    assert_nothing_is_left(launch)


def test_jobs_that_fail_say_why_and_leave_nothing(slurm):
    """A refused configuration, an interpreter without the package, a port in use; and one that is cancelled."""
    cancelled = slurm.launch("cancelled", num_steps=1000)
    failing = {
        "would end in the same way": slurm.launch("refused", "--data.prompts-per-step", "1000000"),
        "has no gtpo_megatron": slurm.launch("bare", "--python", "/bin/false"),
        "choose another with --ray-port": slurm.launch("port", "--ray-port", "16828"),  # slurmd's
    }
    for words, launch in failing.items():
        assert launch.wait() == 1
        assert words in launch.output
        last = launch.told.splitlines()[-1]
        assert f"job {launch.job_id} is FAILED" in last
        assert "not restarted: " in last
        assert f"logs: {launch.run_dir}/logs" in last
        assert_nothing_is_left(launch)
    assert "exceeds the" in failing["would end in the same way"].output, "the driver's own words"

    cancelled.until("its Ray", lambda: list((cancelled.run_dir / "launch").glob("*/head.*")))
    assert cancelled.processes()
    scancel(cancelled.job_id)
    assert cancelled.wait() == 1
    assert f"job {cancelled.job_id} is CANCELLED" in cancelled.told.splitlines()[-1]
    assert_nothing_is_left(cancelled)


def test_what_slurm_would_refuse_is_not_submitted(slurm):
    launch = slurm.launch("nowhere", "--partition", "nowhere")
    assert launch.wait() == 2
    last = launch.told.splitlines()[-1]
    assert "Slurm would refuse the job: " in last
    assert "nvalid partition" in last
    assert "\njobs " not in launch.told


def scancel(*arguments):
    subprocess.run(["scancel", *arguments], check=True, timeout=60)
