"""``gtpo-megatron train``: what it says of a run that was stopped. Whole runs are tests/integration's."""

import signal

import pytest

from gtpo_megatron import train as training
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.train import leave_report
from gtpo_megatron.companions.report import page
from gtpo_megatron.orchestration.loop.controller import RunSummary
from gtpo_megatron.run_folder.stop_request import interrupt
from tests.unit.companions.report.run_folders import make_run


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0, "stopped before the first step (time limit); --resume begins it"),
        (3, "stopped after step 3 (time limit), saved; --resume goes on"),
    ],
)
def test_only_what_was_saved_is_called_saved(monkeypatch, capsys, step, said):
    summary = RunSummary(before=None, after=None, stopped_after=step, stop_reason="time limit")
    monkeypatch.setattr(training, "train", lambda *_, **__: summary)
    monkeypatch.setattr("gtpo_megatron.cli.train.leave_report", lambda _: None)
    assert dispatch.run(["train", "recipes.tiny_cpu:gtpo"]) == 75
    assert capsys.readouterr().out.strip() == said


def test_the_page_is_written_at_the_end(tmp_path):
    run = make_run(tmp_path / "run")
    assert leave_report(run) == run / "report.html"
    assert "</html>" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [OSError("no space left"), ValueError("a bug"), interrupt(signal.SIGTERM)])
def test_a_page_that_cannot_be_written_is_a_warning_with_the_command_for_later(tmp_path, monkeypatch, caplog, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(page, "write_report", broken)
    run = make_run(tmp_path / "run")
    assert leave_report(run) is None
    assert str(error) in caplog.text
    assert f"gtpo-megatron report {run}" in caplog.text
