"""Slurm's answers, as its two commands print them."""

import pytest

from launchers import job_state
from launchers.job_state import JobState

SHOWN = (
    "JobId=7 JobName=gtpo UserId=root(0) Priority=1 Account=team JobState={state} Reason={reason} Dependency=(null) "
    "Requeue=1 Restarts=2 BatchFlag=2 Reboot=0 ExitCode={code} RunTime=00:00:05"
)


def answers(monkeypatch, **by_command):
    monkeypatch.setattr(job_state, "_ask", lambda command: by_command.get(command[0], ""))


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected", "ended", "text"),
    [
        ("RUNNING", "None", "0:0", 0, False, "RUNNING, restart 2"),
        ("PENDING", "BeginTime", "0:0", 0, False, "PENDING (BeginTime), restart 2"),
        ("FAILED", "NonZeroExitCode", "3:0", 3, True, "FAILED (NonZeroExitCode), restart 2"),
        ("CANCELLED", "None", "0:15", 143, True, "CANCELLED, restart 2"),
        ("COMPLETED", "None", "0:0", 0, True, "COMPLETED, restart 2"),
    ],
)
def test_a_job_that_the_controller_knows(monkeypatch, state, reason, code, expected, ended, text):
    answers(monkeypatch, scontrol=SHOWN.format(state=state, reason=reason, code=code))
    found = job_state.job_state("7")
    assert (found.name, found.exit_status, found.has_ended, str(found)) == (state, expected, ended, text)


def test_an_old_job_is_in_the_accounting(monkeypatch):
    answers(monkeypatch, sacct="CANCELLED by 1000|0:15\n")
    assert job_state.job_state("7") == JobState(name="CANCELLED", exit_status=143)
    answers(monkeypatch)
    assert job_state.job_state("7") is None


def test_waiting_tells_every_change_once(monkeypatch):
    states = iter(["PENDING", "PENDING", "RUNNING", "RUNNING", "COMPLETED"])
    monkeypatch.setattr(job_state, "job_state", lambda _: JobState(name=next(states)))
    monkeypatch.setattr(job_state, "POLL_S", 0.0)
    said = []
    assert job_state.wait_for("7", said.append).name == "COMPLETED"
    assert said == ["job 7: PENDING", "job 7: RUNNING", "job 7: COMPLETED"]


def test_a_job_that_slurm_has_lost_is_given_up(monkeypatch):
    monkeypatch.setattr(job_state, "job_state", lambda _: None)
    monkeypatch.setattr(job_state, "POLL_S", 0.0)
    monkeypatch.setattr(job_state, "PATIENCE_S", 0.05)
    assert job_state.wait_for("7", pytest.fail) is None
