"""``checkpoints/latest`` that is gone, garbage or wrong loses no run: the newest whole checkpoint is found or named."""

import dataclasses
import io
import json
import shutil

import pytest
from rich.console import Console

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.conversion import find_checkpoint
from gtpo_megatron.companions.evaluate.evaluated_model import find_model
from gtpo_megatron.companions.status import read_status
from gtpo_megatron.companions.verify_resume.compare import compare_runs
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import JsonlSink
from gtpo_megatron.weights.megatron.checkpoint_files import sealed
from recipes import tiny_cpu
from tests.unit.orchestration import checkpoints
from tests.unit.orchestration.checkpoints import save, save_model

LOSSES = {
    "gone": lambda marker: marker.unlink(),
    "empty": lambda marker: marker.write_text(""),
    "garbage": lambda marker: marker.write_bytes(b"\xff\x00\xfe" * 100),
    "large": lambda marker: marker.write_text("x" * 100_000),
    "missing": lambda marker: marker.write_text("step_99\n"),
    "leads out": lambda marker: marker.write_text("../../elsewhere\n"),
    "absolute": lambda marker: marker.write_text("/etc\n"),
    "dot": lambda marker: marker.write_text(".\n"),
    "two names": lambda marker: marker.write_text("step_2\nstep_4\n"),
    "folder": lambda marker: (marker.unlink(), marker.mkdir()),
    "dangling link": lambda marker: (marker.unlink(), marker.symlink_to("nowhere")),
}


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_the_newest_whole_one_is_found_and_said(folder, loss):
    save(folder, 2)
    save(folder, 10)
    LOSSES[loss](folder.path / "latest")
    for verify in ("full", "sizes", "none"):
        found = folder.latest(verify)
        assert found.state.step == 10
        assert found.path == folder.path / "step_10"
        assert "step_10 is taken, the newest whole checkpoint" in found.note
        assert "\n" not in found.note
        assert str(folder.path / "latest") in found.note


def test_a_pointer_that_is_right_needs_no_note(folder):
    save(folder, 2)
    save(folder, 4)
    (folder.path / "latest").write_text("step_2\n")
    found = folder.latest()
    assert (found.state.step, found.note) == (2, "")


def test_without_any_checkpoint_there_is_none(folder):
    assert folder.latest() is None
    folder.begin(1)
    assert folder.latest() is None, "a save that broke off is none"


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"gone"}))
def test_a_pointer_to_nothing_is_refused_where_nothing_is_left(folder, loss):
    shutil.rmtree(save(folder, 2))
    LOSSES[loss](folder.path / "latest")
    with pytest.raises(CheckpointError, match="and no checkpoint is there"):
        folder.latest()


def test_it_is_refused_where_the_newest_is_not_whole(folder):
    save(folder, 2)
    checkpoints.flip(save(folder, 4) / "driver.json")
    (folder.path / "latest").unlink()
    message = "latest is missing, and step_4, the newest, is not whole; whole are step_2: write one of these names into"
    with pytest.raises(CheckpointError, match=message):
        folder.latest()


def test_it_is_refused_where_none_is_whole(folder):
    (save(folder, 4) / "manifest.json").unlink()
    (folder.path / "latest").unlink()
    with pytest.raises(CheckpointError, match="step_4, the newest, is not whole$"):
        folder.latest()
    assert folder.latest("none").state.step == 4


def test_it_is_refused_where_a_run_has_gone_two_ways(folder):
    """Step 6 is left from before the run went back to step 2."""
    for step, created in ((2, "2026-01-01T00:00:00+00:00"), (6, "2026-01-02T00:00:00+00:00")):
        written_at(save(folder, step, keep=9), created)
    written_at(save(folder, 4, keep=9), "2026-01-03T00:00:00+00:00")
    assert folder.latest().state.step == 4
    (folder.path / "latest").unlink()
    message = "step_6 is not the one that was written last: .*; whole are step_2, step_4, step_6: write one of these"
    with pytest.raises(CheckpointError, match=message):
        folder.latest()


def written_at(path, created):
    plain = json.loads((path / "manifest.json").read_text()) | {"created": created}
    del plain["checksum"]
    (path / "manifest.json").write_text(sealed(plain))


# ------------------------------------------------------------------------------------------------------- the commands
class StartedError(Exception):
    """Instead of processes: all that comes before them went well."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of six steps with checkpoints at 2 and 4; its pointer is lost."""
    config = tiny_cpu.gtpo()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    metrics = JsonlSink(folder / "metrics.jsonl")
    for step in range(7):
        metrics.write(step, {"policy/loss": 0.5})
    metrics.close()
    sampler = train.prompt_sampler(config, train.check_inputs(config)).state_dict()
    monkeypatch.setattr(
        checkpoints,
        "state",
        lambda step: DriverState(step=step, sampler=sampler, counters={}, mismatch={"samples": []}),
    )
    for step in (2, 4):
        save_model(CheckpointFolder(folder / "checkpoints"), step)
    (folder / "checkpoints" / "latest").unlink()
    return folder


def resume(run, monkeypatch, **fields):
    """Up to the start of processes; the steps that are in the metrics then."""

    def started(*_, **__):
        raise StartedError

    monkeypatch.setattr(train, "_stages", started)
    monkeypatch.setattr(train, "set_up_logs", lambda **_: None)
    config = dataclasses.replace(tiny_cpu.gtpo(), **fields)
    with pytest.raises((StartedError, CheckpointError)) as ended:
        train.train(config, run_dir=run, resume=True, console=Console(file=io.StringIO()))
    rows = (run / "metrics.jsonl").read_text().splitlines()
    return ended.value, [json.loads(row)["step"] for row in rows]


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_it_and_keeps_its_metrics(run, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        ended, steps = resume(run, monkeypatch)
    assert isinstance(ended, StartedError)
    assert steps == [0, 1, 2, 3, 4]
    assert "latest is missing: step_4 is taken, the newest whole checkpoint" in caplog.text


@pytest.mark.slow
def test_a_resumed_run_is_refused_and_keeps_everything_where_it_is_not_clear(run, monkeypatch):
    checkpoints.flip(run / "checkpoints" / "step_4" / ".metadata")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run_state.json"}
    ended, steps = resume(run, monkeypatch)
    assert "step_4, the newest, is not whole; whole are step_2" in str(ended)
    assert steps == list(range(7))
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_other_commands_find_it_too(run, capsys, caplog):
    note = "latest is missing: step_4 is taken"
    status = read_status(run)
    assert status.checkpoint_step == 4
    assert any(note in remark for remark in status.remarks)
    dispatch.run(["status", str(run)])
    assert note in " ".join(capsys.readouterr().out.split())
    assert find_checkpoint(run, None)[0] == run / "checkpoints" / "step_4"
    assert note in caplog.text
    caplog.clear()
    assert find_model(run, "", tiny_cpu.gtpo()).checkpoint == "step_4"
    assert note in caplog.text
    assert all(result.is_equal for result in compare_runs(run, run))


@pytest.mark.slow
def test_a_checkpoint_that_is_asked_for_is_a_bare_name(run, tmp_path):
    shutil.copytree(run / "checkpoints" / "step_4", tmp_path / "x")
    paths = ("../../x", "/etc", "..", ".", "step_4/..", "step_4/", "./step_4")
    for name in (*paths, "step_4\n", "\x00", "x" * 300, "step_٤"):
        with pytest.raises(ConfigError, match=r"\A.*has step_2, step_4; or say latest.*\Z"):  # one line
            find_model(run, name, tiny_cpu.gtpo())
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]


@pytest.mark.slow
def test_a_run_that_was_told_to_go_elsewhere_is_left_as_it_is(run):
    assert RunFolder(run).checkpoints.latest().path.parent == run / "checkpoints"
