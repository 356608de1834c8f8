import dataclasses
import errno
import os
import shutil
import socket
import subprocess
import sys

import pytest

from gtpo_megatron.companions.evaluate import evaluated_model
from gtpo_megatron.companions.evaluate.evaluated_model import find_model
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.conversion_lock import alone
from gtpo_megatron.run_folder.state import record_end, record_start
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS
from tests.unit.orchestration.checkpoints import save_model

MODEL = ASSETS / "tiny_qwen2"


@pytest.fixture
def run():
    return tiny_cpu.gtpo()


def checkpoint(folder, run, name):
    """A checkpoint of the tiny model in a run's folder."""
    save_model(CheckpointFolder(folder / "checkpoints"), int(name.removeprefix("step_")))


def test_a_model_folder_is_itself():
    found = find_model(MODEL, "", None)
    assert (found.folder, found.checkpoint) == (MODEL, "")


def test_a_model_folder_has_no_checkpoints():
    with pytest.raises(ConfigError, match="checkpoint='latest': .* is no run folder"):
        find_model(MODEL, "latest", None)


def test_a_run_has_its_export(tmp_path, run):
    (tmp_path / "hf").mkdir()
    with pytest.raises(ConfigError, match=r"hf: neither a Hugging Face model folder"):
        find_model(tmp_path, "", run)
    shutil.copytree(MODEL, tmp_path / "hf", dirs_exist_ok=True)
    assert find_model(tmp_path, "", run).folder == tmp_path / "hf"


@pytest.mark.parametrize("name", ["adapter_config.json", "model.safetensors.index.json"])
def test_weights_that_transformers_would_load_otherwise_are_refused(tmp_path, name):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    assert find_model(tmp_path, "", None).folder == tmp_path
    (tmp_path / name).write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(ConfigError, match=name):
        find_model(tmp_path, "", None)


def ended_run(folder, run, outcome):
    """A run that has exported its model, and how its last start ended."""
    checkpoint(folder, run, "step_4")
    shutil.copytree(MODEL, folder / "hf")
    record_start(folder)
    if outcome:
        record_end(folder, outcome)
    return folder


def test_a_run_that_has_finished_has_its_export(tmp_path, run, caplog):
    assert find_model(ended_run(tmp_path, run, "finished"), "", run).folder == tmp_path / "hf"
    assert not caplog.messages


@pytest.mark.parametrize("outcome", ["", "stopped after step 4: SIGTERM", "CheckpointError: no room for the export"])
def test_a_run_that_went_on_after_its_export_has_its_latest_checkpoint(tmp_path, run, caplog, outcome):
    """The export is of the end before, however the run has ended since; "": it was killed, or goes on."""
    found = find_model(ended_run(tmp_path, run, outcome), "", run)
    assert (found.folder, found.checkpoint) == (tmp_path / "evaluations" / "step_4" / "hf", "step_4")
    assert f"{tmp_path}/hf may be of an earlier step" in caplog.text


def test_a_run_that_went_on_without_an_export_has_its_latest_checkpoint(tmp_path, run):
    run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, export_hf=False))
    assert find_model(ended_run(tmp_path, run, "finished"), "", run).checkpoint == "step_4"


@pytest.mark.parametrize("state", [None, "{", '{"outcome": 3}'])
def test_an_export_of_a_run_of_which_nothing_else_is_known_gives_way_to_a_checkpoint(tmp_path, run, caplog, state):
    ended_run(tmp_path, run, "")
    (tmp_path / "run_state.json").unlink()
    if state is not None:
        (tmp_path / "run_state.json").write_text(state)
    assert find_model(tmp_path, "", run).checkpoint == "step_4"
    shutil.rmtree(tmp_path / "checkpoints")
    assert find_model(tmp_path, "", run).folder == tmp_path / "hf"
    assert "it is taken, as there is no checkpoint" in caplog.text


def test_a_checkpoint_is_converted_once_and_holds_the_same_weights(tmp_path, run, monkeypatch):
    from safetensors.torch import load_file

    checkpoint(tmp_path, run, "step_4")
    found = find_model(tmp_path, "step_4", run)
    assert (found.folder, found.checkpoint) == (tmp_path / "evaluations" / "step_4" / "hf", "step_4")
    weights, original = (load_file(folder / "model.safetensors") for folder in (found.folder, MODEL))
    assert weights.keys() == original.keys()
    assert all(weights[name].equal(original[name]) for name in original)
    monkeypatch.setattr(evaluated_model, "megatron_to_hf", None)
    assert find_model(tmp_path, "step_4", run) == found


def test_what_was_converted_without_a_check_is_not_taken_by_one_that_checks(tmp_path, run):
    checkpoint(tmp_path, run, "step_4")
    evaluations = tmp_path / "evaluations" / "step_4"
    assert find_model(tmp_path, "step_4", run, verify="none").folder == evaluations / "hf-unverified"
    assert find_model(tmp_path, "step_4", run).folder == evaluations / "hf"
    assert find_model(tmp_path, "step_4", run, verify="none").folder == evaluations / "hf"


CONVERTS = """
import sys
from pathlib import Path
from gtpo_megatron.companions.evaluate import evaluated_model
from gtpo_megatron.companions.evaluate.evaluated_model import find_model
from recipes import tiny_cpu
assert find_model(Path(sys.argv[1]), "step_4", tiny_cpu.gtpo()).checkpoint == "step_4"
"""


def lines_until(text, stream):
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            break
    return lines


@pytest.mark.slow
def test_processes_that_need_one_checkpoint_at_once_convert_it_once(tmp_path, run):
    """Both find no converted model, since a third holds the lock; then one converts and the other takes it."""
    checkpoint(tmp_path, run, "step_4")
    target = tmp_path / "evaluations" / "step_4" / "hf"
    with alone(target, otherwise="a command"):
        both = [
            subprocess.Popen([sys.executable, "-c", CONVERTS, str(tmp_path)], stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        said = [lines_until("waiting for", process.stderr) for process in both]
        assert not target.exists()
    rest = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], (said, rest)
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert [lines[-1] for lines in said] == [f"waiting for {holder}, which is making {target}\n"] * 2
    assert sum("is converted to" in text for text in rest) == 1
    assert (target / "model.safetensors").is_file()
    assert not list(target.parent.glob(".hf.partial*"))


def test_a_run_folder_that_cannot_be_written_is_said(tmp_path, run):
    checkpoint(tmp_path, run, "step_4")
    (tmp_path / "evaluations").write_text("")
    with pytest.raises(ConfigError, match=r"evaluations/step_4 cannot be written: .*convert elsewhere"):
        find_model(tmp_path, "step_4", run)


def test_a_file_system_without_locks_is_said(tmp_path, run, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    checkpoint(tmp_path, run, "step_4")
    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"step_4 cannot be locked: No locks available; .*convert it elsewhere"):
        find_model(tmp_path, "step_4", run)


def test_checkpoints_that_are_not_there_are_said(tmp_path, run):
    with pytest.raises(ConfigError, match=r"has neither an exported model .* nor a checkpoint yet"):
        find_model(tmp_path, "", run)
    checkpoint(tmp_path, run, "step_4")
    with pytest.raises(ConfigError, match=r"checkpoint='step_5': run .* has step_4; or say latest"):
        find_model(tmp_path, "step_5", run)


def test_a_run_that_has_not_ended_has_its_latest_checkpoint(tmp_path, run, monkeypatch):
    checkpoint(tmp_path, run, "step_4")

    class Folder:
        def __init__(self, path):
            self.path = path

        def latest(self, verify):
            return dataclasses.make_dataclass("Found", ["path", "note"])(self.path / "step_4", "")

    monkeypatch.setattr(evaluated_model, "CheckpointFolder", Folder)
    assert find_model(tmp_path, "", run).checkpoint == "step_4"
