"""What ``train`` does around a run; whole runs are in tests/integration."""

import pytest

from gtpo_megatron import train
from gtpo_megatron.orchestration.run_folder import RunFolder
from tests.unit.observability.run_folders import make_run


def test_the_report_is_written_at_the_end(tmp_path):
    folder = RunFolder(make_run(tmp_path / "run"))
    assert train.leave_report(folder) == folder.report_file
    assert "</html>" in folder.report_file.read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [OSError("no space left"), ValueError("a bug")])
def test_a_report_that_cannot_be_written_is_a_warning_with_the_command_for_later(tmp_path, monkeypatch, caplog, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(train, "write_report", broken)
    folder = RunFolder(make_run(tmp_path / "run"))
    assert train.leave_report(folder) is None
    assert str(error) in caplog.text
    assert f"gtpo-megatron report {folder.path}" in caplog.text
