"""A run folder belongs to one configuration, and its checkpoints are whole or not there."""

import dataclasses
import json

import pytest

from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.orchestration.run_folder import DriverState, RunFolder
from recipes import tiny_cpu


def state(step):
    return DriverState(step=step, sampler={"epoch": 0, "position": step}, counters={"responses": 8 * step})


def checkpoint(folder, step, keep=2):
    scratch = folder.begin_checkpoint(step)
    (scratch / "weights").write_text(f"step {step}", encoding="utf-8")
    return folder.finish_checkpoint(scratch, state(step), keep=keep)


@pytest.fixture
def folder(tmp_path):
    opened = RunFolder(tmp_path / "run")
    opened.open(tiny_cpu.gtpo(), resume=False)
    yield opened
    opened.close()


def test_the_configuration_is_written_whole(folder):
    assert load_config(folder.config_file) == tiny_cpu.gtpo()


def test_a_folder_with_a_run_needs_resume(folder):
    with pytest.raises(ConfigError, match="holds a run already; add --resume"):
        folder.open(tiny_cpu.gtpo(), resume=False)
    folder.open(tiny_cpu.gtpo(), resume=True)


def test_another_configuration_is_refused_and_the_old_one_kept(folder):
    with pytest.raises(ConfigError, match="another configuration: seed: 0 -> 3"):
        folder.open(tiny_cpu.gtpo(seed=3), resume=True)
    assert load_config(folder.config_file).seed == 0


def test_a_longer_run_goes_on(folder):
    folder.open(tiny_cpu.gtpo(num_steps=80), resume=True)
    assert load_config(folder.config_file).num_steps == 80


def test_a_longer_run_with_a_decaying_rate_is_another_run(tmp_path):
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule="cosine"))
    folder = RunFolder(tmp_path / "run")
    folder.open(config, resume=False)
    with pytest.raises(ConfigError, match="num_steps: 40 -> 80"):
        folder.open(dataclasses.replace(config, num_steps=80), resume=True)
    folder.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").open(tiny_cpu.gtpo(), resume=False)


def test_the_latest_checkpoint_comes_back(folder):
    assert folder.latest_checkpoint() is None
    checkpoint(folder, 1)
    checkpoint(folder, 2)
    path, found = folder.latest_checkpoint()
    assert found == state(2)
    assert (path / "weights").read_text(encoding="utf-8") == "step 2"


def test_old_checkpoints_are_dropped_by_number(folder):
    for step in (8, 9, 10):
        checkpoint(folder, step)
    kept = sorted(path.name for path in (folder.path / "checkpoints").glob("step_*"))
    assert kept == ["step_10", "step_9"]


def test_leftovers_are_never_in_the_way(folder):
    """A checkpoint of a later step from a run that went another way, and a copy that somebody made."""
    checkpoint(folder, 10, keep=1)
    (folder.path / "checkpoints" / "step_20").mkdir()
    (folder.path / "checkpoints" / "step_10_backup").mkdir()
    checkpoint(folder, 12, keep=1)
    assert folder.latest_checkpoint()[1].step == 12
    kept = sorted(path.name for path in (folder.path / "checkpoints").glob("step_*"))
    assert kept == ["step_10_backup", "step_12", "step_20"]


def test_a_folder_in_use_is_refused(folder):
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder(folder.path).open(tiny_cpu.gtpo(), resume=True)


def test_a_save_that_breaks_off_leaves_the_last_good_one(folder):
    checkpoint(folder, 1)
    scratch = folder.begin_checkpoint(2)
    (scratch / "weights").write_text("half", encoding="utf-8")
    assert folder.latest_checkpoint()[1].step == 1
    again = folder.begin_checkpoint(2)  # the resumed run starts this save afresh
    assert list(again.iterdir()) == []


def test_a_step_that_is_saved_again_replaces_the_first(folder):
    checkpoint(folder, 3)
    path = checkpoint(folder, 3)
    assert (path / "weights").exists()
    assert folder.latest_checkpoint()[1].step == 3


def test_a_marker_without_its_checkpoint_is_named(folder):
    path = checkpoint(folder, 4)
    (path / "driver.json").write_text(json.dumps({"step": 4}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="names step_4, which cannot be read"):
        folder.latest_checkpoint()


def test_a_full_disk_at_the_last_moment_leaves_the_last_good_one(folder, monkeypatch):
    checkpoint(folder, 1)
    scratch = folder.begin_checkpoint(2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "_write_aside", full)
    with pytest.raises(CheckpointError, match="No space left on device; the last good one stays valid"):
        folder.finish_checkpoint(scratch, state(2), keep=2)
    assert folder.latest_checkpoint()[1].step == 1
