"""A run folder in every condition a run can be in."""

import json
import os
import shutil
import time

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.status import screen
from gtpo_megatron.companions.status import Accuracy, read_status
from gtpo_megatron.errors import CheckpointError, DataError
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.folder import RunFolder
from recipes import tiny_cpu
from tests.unit.orchestration.checkpoints import save

LOG = """\
2025-01-01 10:00:00,000 INFO    gtpo_megatron.run_folder.provenance: versions: torch 2
2025-01-01 10:00:01,000 ERROR   [rank 1] gtpo_megatron.actor: of an earlier start
2025-01-01 10:00:02,000 INFO    gtpo_megatron.run_folder.provenance: versions: torch 2
2025-01-01 10:00:03,000 ERROR   [reward] gtpo_megatron.rewards: a worker died
"""


@pytest.fixture
def folder(tmp_path):
    """A run of 40 steps that has done 4, is saved at 2, and is running."""
    folder = RunFolder(tmp_path / "run")
    folder.open(tiny_cpu.gtpo(), resume=False)
    rows = [{"step": 0, "eval/heldout_mean_at_k": 0.0}]
    rows += [{"step": step, "timing/step_s": 2.0, "rollout/reward_mean": 0.25 * step} for step in range(1, 5)]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder.path / "log.txt").write_text(LOG, encoding="utf-8")
    save(folder.checkpoints, 2)
    yield folder
    folder.close()


def test_a_running_run(folder):
    status = read_status(folder.path)
    assert (status.state, status.step, status.num_steps) == ("running", 4, 40)
    assert status.seconds_left == 2.0 * 36
    assert status.checkpoint_step == 2
    assert status.accuracies == (Accuracy(label="heldout", step=0, value=0.0, before=None),)
    assert (status.num_errors, status.last_error) == (1, "[reward] gtpo_megatron.rewards: a worker died")
    lines = dict(screen(status))
    assert lines["step"] == "4 of 40 (10%), 2s a step, about 1:12 left"
    assert "reward 1.000" in lines["last row"]
    assert lines["heldout"] == "0.0% after step 0"
    assert "2 steps behind" in lines["checkpoint"]
    assert f"process {os.getpid()} on" in lines["state"]


def test_a_run_that_has_not_moved_for_long_is_silent(folder):
    long_ago = time.time() - 7200
    os.utime(folder.path / "metrics.jsonl", (long_ago, long_ago))
    assert read_status(folder.path).state == "running", "it has only just started"
    state = json.loads((folder.path / run_state.STATE_FILE).read_text(encoding="utf-8"))
    (folder.path / run_state.STATE_FILE).write_text(json.dumps(state | {"started_at": long_ago}), encoding="utf-8")
    status = read_status(folder.path)
    assert status.state == "silent"
    assert "hung?" in dict(screen(status))["state"]


@pytest.mark.parametrize(
    ("outcome", "state", "words", "exit_status"),
    [
        ("finished", "finished", "finished (", 0),
        ("stopped after step 4: time limit", "stopped", "time limit", 0),
        ("WorkerError: rank 1 died in update", "failed", "failed: WorkerError: rank 1 died", 1),
        ("", "gone", "ended without a word", 1),
    ],
)
def test_a_run_that_ended(folder, capsys, outcome, state, words, exit_status):
    if outcome:
        run_state.record_end(folder.path, outcome)
    folder.close()
    assert read_status(folder.path).state == state
    assert dispatch.run(["status", str(folder.path)]) == exit_status
    out = capsys.readouterr().out
    assert words in out
    assert len(out.splitlines()) < 12
    assert ("--resume" in out) == (state != "finished")


def test_restarts_are_shown(folder):
    folder.close()
    folder.open(tiny_cpu.gtpo(), resume=True)
    assert "restarts: 1" in dict(screen(read_status(folder.path)))["state"]


def test_a_run_before_its_first_step(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open(tiny_cpu.gtpo(), resume=False)
    lines = dict(screen(read_status(tmp_path)))
    assert lines["step"] == "0 of 40 (0%)"
    assert lines["checkpoint"] == "none yet"
    folder.close()


def test_what_cannot_be_read_is_a_remark(folder):
    (folder.path / "checkpoints" / "latest").write_text("step_9\n", encoding="utf-8")
    (folder.path / "metrics.jsonl").write_text("not json\n{}\n", encoding="utf-8")
    remarks = [text for label, text in screen(read_status(folder.path)) if label == "remark"]
    assert len(remarks) == 2


def test_a_checkpoint_that_is_dropped_while_it_is_read(folder, monkeypatch):
    """By the run, which has just saved a newer one."""
    latest = CheckpointFolder.latest

    def and_drop(self, *arguments):
        checkpoint = latest(self, *arguments)
        shutil.rmtree(checkpoint.path)
        return checkpoint

    def then_find_it(self, *arguments):
        monkeypatch.setattr(CheckpointFolder, "latest", latest)
        raise CheckpointError("step_1 lacks driver.json")

    expected = read_status(folder.path).checkpoint_step
    assert expected is not None
    monkeypatch.setattr(CheckpointFolder, "latest", then_find_it)
    status = read_status(folder.path)
    assert (status.checkpoint_step, status.remarks) == (expected, ())
    monkeypatch.setattr(CheckpointFolder, "latest", and_drop)
    status = read_status(folder.path)
    assert (status.checkpoint_step, status.checkpoint_age_s) == (expected, 0.0)


def test_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(DataError, match="no run is in this folder"):
        read_status(tmp_path)
    assert dispatch.run(["status", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
