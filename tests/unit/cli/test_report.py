"""``gtpo-megatron report``: where it writes, and what it says where it cannot."""

from pathlib import Path

import pyarrow.parquet
import pytest

from gtpo_megatron.cli import dispatch
from tests.unit.companions.report.run_folders import make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", num_steps=2, responses=False)


def test_the_page_goes_to_the_run_or_where_it_is_asked_for(run, tmp_path, capsys):
    assert dispatch.run(["report", str(run)]) == 0
    assert dispatch.run(["report", str(run), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(tmp_path / "new" / "page.html")]
    assert (run / "report.html").read_bytes() == (tmp_path / "new" / "page.html").read_bytes()


def test_the_page_of_several_runs_replaces_nothing(tmp_path, monkeypatch, capsys):
    runs = [make_run(tmp_path / "runs" / name, num_steps=2, responses=False) for name in ("a", "b")]
    (runs[0] / "report.html").write_text("its own")
    monkeypatch.chdir(tmp_path)
    assert dispatch.run(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert dispatch.run(["report", "runs"]) == 2
    assert "report.html exists and is kept" in capsys.readouterr().err
    assert dispatch.run(["report", "runs", "--output", "report.html"]) == 0
    assert "2 training runs" in Path("report.html").read_text()
    assert (runs[0] / "report.html").read_text() == "its own"


def test_an_output_that_cannot_be_written_is_one_line_and_leaves_nothing(run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for output, message in (
        ("folder", "is a folder"),
        ("file/page.html", "cannot be written"),
        ("x" * 300, "too long"),
    ):
        assert dispatch.run(["report", str(run), "--output", str(tmp_path / output)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "--output" in error
        assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "run"]


@pytest.mark.slow
def test_a_device_stays_what_it_is(run, tmp_path, capsys):
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    assert dispatch.run(["report", str(run), "--output", str(device)]) == 0
    assert device.is_char_device()
    assert dispatch.run(["report", str(run), "--output", "/dev/full"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_the_responses_are_written_as_a_table_beside_the_page(tmp_path, capsys):
    run, table = make_run(tmp_path / "full", num_steps=2), tmp_path / "new" / "responses.parquet"
    assert dispatch.run(["report", str(run), "--parquet", str(table), "--dollars-per-gpu-hour", "3"]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(table)]
    assert pyarrow.parquet.read_metadata(table).num_rows == 11
    assert "$12.00 = 8 GPUs x 0.50 h x $3.00 a GPU and hour" in (run / "report.html").read_text()


def test_a_table_that_cannot_be_written_and_a_price_that_is_none_are_one_line(run, tmp_path, capsys):
    for options, status, message in (
        (["--parquet", str(tmp_path / "x.parquet")], 1, "no sampled responses in"),
        (["--parquet", str(tmp_path)], 2, f"--parquet {tmp_path} is a folder"),
        (["--dollars-per-gpu-hour", "-1"], 2, "--dollars-per-gpu-hour -1 is no price"),
    ):
        assert dispatch.run(["report", str(run), *options]) == status
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        dispatch.run(["report", str(run), "--dollars-per-gpu-hour", "nan"])
    assert "dollars_per_gpu_hour=nan: must be a finite number" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.parquet").exists()
