"""A few of the faults of ``python -m tests.chaos``, and what runs leave in memory, on disk and among the processes."""

import signal
import time

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import Fault
from tests.chaos.world import BrokenRun

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # of what reads the runs' files
]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def fault(kind, stage, number=KILL):
    return Fault(kind=kind, number=number, stage=stage, delay_s=0.0)


def attack(folder, faults, *options, num_steps=20):
    said = []
    campaign = Campaign(folder, num_steps=num_steps, options=options, say=said.append)
    assert campaign.prepare() == [], "a run in peace leaves nothing behind"
    cases = campaign.attack(faults, deadline=time.monotonic() + 1200)
    assert len(cases) == len(faults), said
    for case in cases:
        assert case.is_good(), (case, said)
        assert case.equal is True, said
    return cases


def leaves_nothing(folder, *options):
    run = BrokenRun(folder, num_steps=1, options=options, resume=False)
    try:
        while not run.has_ended():
            run.look()
            time.sleep(0.1)
        assert run.process.returncode == 0, run.output[-3000:]
        assert run.left_behind() == []
    finally:
        run.clear()


def test_rays_gcs_and_the_driver_are_killed(tmp_path):
    """An engine of TP 2. Without the GCS Ray waited for a minute and then ended the driver without a word of ours."""
    ended, killed = attack(
        tmp_path,
        [fault("Ray's GCS", "rollout"), fault("driver", "weight_sync")],
        *("--rollout.tensor-parallel-size", "2"),
    )
    assert ended.line.startswith("gtpo-megatron: WorkerError: Ray's GCS (process ")
    assert (ended.outcome, killed.outcome) == ("ended", "ended")


def test_two_engines_leave_nothing(tmp_path):
    leaves_nothing(tmp_path / "run", "--rollout.num-engines", "2")


@pytest.mark.slow
def test_an_engine_of_one_process_leaves_nothing(tmp_path):
    leaves_nothing(tmp_path / "run")


@pytest.mark.slow
def test_who_dies_or_stops_is_named(tmp_path):
    """Rank 0 was reported as rank 1, a raylet as the engine, and of a stopped rank both were named."""
    faults = [
        fault("rank 0", "update"),
        fault("Ray's raylet", "score"),
        fault("rank 1", "update", STOP),
        fault("engine worker", "rollout"),
        fault("Ray's dashboard agent", "rollout"),
        fault("keeper", "rollout"),
    ]
    attack(tmp_path, faults, "--rollout.tensor-parallel-size", "2", num_steps=30)
