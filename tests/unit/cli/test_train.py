"""``gtpo-megatron train``: what it says of a run that was stopped. Whole runs are tests/integration's."""

import pytest

from gtpo_megatron import train as training
from gtpo_megatron.cli import dispatch
from gtpo_megatron.orchestration.loop.controller import RunSummary


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
    assert dispatch.run(["train", "recipes.tiny_cpu:gtpo"]) == 75
    assert capsys.readouterr().out.strip() == said
