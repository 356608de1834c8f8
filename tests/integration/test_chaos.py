"""A few of the faults of ``python -m tests.chaos``, and what runs leave in memory, on disk and among the processes."""

import time

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import Fault
from tests.chaos.world import BrokenRun
from tests.integration.runs import LEAVINGS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    LEAVINGS,
    pytest.mark.filterwarnings("ignore"),  # of what reads the runs' files
]


def fault(kind, stage):
    return Fault(kind=kind, stage=stage, delay_s=0.0)


def attack(folder, faults, *options, num_steps):
    """What came of each fault, by its words."""
    said = []
    campaign = Campaign(folder, num_steps=num_steps, options=options, say=said.append)
    assert campaign.prepare() == [], "a run in peace leaves nothing behind"
    deadline = time.monotonic() + 1200
    cases, todo = {}, faults
    while todo and time.monotonic() < deadline:
        # on a loaded machine a short stage may be missed in every step until the run's end: then another run takes it
        cases |= {case.fault: case for case in campaign.attack(todo, deadline=deadline)}
        todo = [fault for fault in faults if str(fault) not in cases]
    story = "\n".join(said)  # pytest shortens a list
    assert todo == [], story
    for case in cases.values():
        assert case.is_good(), f"{case}\n{story}"
        assert case.equal is True, story
    return cases


def test_two_engines_leave_nothing(tmp_path):
    """Of one process each."""
    run = BrokenRun(tmp_path / "run", num_steps=1, options=("--rollout.num-engines", "2"), resume=False)
    try:
        while not run.has_ended():
            run.look()
            time.sleep(0.1)
        assert run.process.returncode == 0, run.output[-3000:]
        assert run.left_behind() == []
    finally:
        run.clear()


def test_who_dies_is_named(tmp_path):
    """Once rank 0 was reported as rank 1, and a raylet as the engine; without the GCS Ray waited for a minute and then
    ended the driver without a word of ours. The engine has TP 2."""
    faults = [
        fault("Ray's GCS", "rollout"),
        fault("driver", "weight_sync"),
        fault("rank 0", "update"),
        fault("Ray's raylet", "score"),
        fault("rank 1", "update"),
        fault("engine worker", "rollout"),
        fault("Ray's dashboard agent", "rollout"),
        fault("supervisor", "rollout"),
    ]
    cases = attack(tmp_path, faults, "--rollout.tensor-parallel-size", "2", num_steps=60)
    ended, killed = (cases[str(fault)] for fault in faults[:2])
    assert ended.line.startswith("gtpo-megatron: WorkerError: Ray's GCS (process "), ended
    assert (ended.outcome, killed.outcome) == ("ended", "ended"), (ended, killed)
