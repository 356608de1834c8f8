"""One flipped bit in any file of a checkpoint is refused by every reader of it; ``--no-verify`` says that it is not."""

import dataclasses
import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.evaluate import evaluation_run
from gtpo_megatron.companions.evaluate.evaluated_model import find_model
from gtpo_megatron.companions.verify_resume.compare import compare_runs
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import JsonlSink
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from recipes import tiny_cpu
from tests.unit.orchestration.checkpoints import MODEL, flip, save_model
from tools.convert_checkpoint import main as convert

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FILES = ("__0_0.distcp", ".metadata", "metadata.json", "common.pt", "driver.json", "manifest.json")
CONFIG = dataclasses.replace(tiny_cpu.gtpo(), model=dataclasses.replace(tiny_cpu.gtpo().model, path=str(MODEL)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a checkpoint of the tiny model."""
    run = tmp_path_factory.mktemp("whole") / "run"
    checkpoint = save_model(CheckpointFolder(run / "checkpoints"), 6)
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(FILES)
    (run / "config.yaml").write_text(to_yaml(CONFIG))
    metrics = JsonlSink(run / "metrics.jsonl")
    for step in range(8):
        metrics.write(step, {"policy/loss": 0.5})
    metrics.close()
    return run


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """Stands for what comes after the model was found."""
    monkeypatch.setattr(evaluation_run, "evaluate_model", lambda *_, **__: None)


def loud(status):
    """A command's status, as the readers below say it."""
    if status:
        raise CheckpointError(f"status {status}")


def resume(run, **checkpoint):
    config = dataclasses.replace(CONFIG, checkpoint=dataclasses.replace(CONFIG.checkpoint, **checkpoint))
    train.train(config, run_dir=run, resume=True, console=Console(file=io.StringIO()))


def export(run):
    """What a run does at its end."""
    train.export(CONFIG, RunFolder(run))


def compared(run):
    list(compare_runs(run, run))


STEP = Path("checkpoints") / "step_6"
READERS = {
    "convert run": lambda run: loud(convert(["megatron-to-hf", str(run), str(run / "out")])),
    "convert checkpoint": lambda run: loud(convert(["megatron-to-hf", str(run / STEP), str(run / "out")])),
    "find model": lambda run: find_model(run, "", CONFIG),
    "evaluate run": lambda run: loud(dispatch.run(["evaluate", str(run)])),
    "evaluate step": lambda run: loud(dispatch.run(["evaluate", str(run), "--checkpoint", "step_6"])),
    "evaluate folder": lambda run: loud(dispatch.run(["evaluate", str(run / STEP)])),
    "export": export,
    "verify-resume": compared,
    "reader": lambda run: CheckpointReader(run / STEP),
}


def cases():
    """Before a commit, every reader with one file and every file with one reader; they share what compares them."""
    for number, reader in enumerate(READERS):
        for file in FILES:
            is_in_gate = reader == "reader" or file == FILES[number % len(FILES)]
            yield pytest.param(reader, file, marks=() if is_in_gate else pytest.mark.nightly)


@pytest.mark.parametrize(("reader", "file"), list(cases()))
def test_no_reader_takes_a_flipped_bit(run, capsys, reader, file):
    flip(run / STEP / file)
    with pytest.raises(CheckpointError) as caught:
        READERS[reader](run)
    said = capsys.readouterr().err + str(caught.value)
    assert file in said
    assert "Traceback" not in said
    assert not (run / "out").exists()
    assert not (run / "hf").exists()
    assert not (run / "evaluations").exists()


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_it_when_it_is_whole(run, reader):
    READERS[reader](run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "driver.json",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in FILES
            if name not in ("driver.json", "__0_0.distcp")
        ),
    ],
)
def test_a_resumed_run_is_refused_before_it_changes_anything(run, monkeypatch, file):
    """Shards are compared by the ranks: ``tests/distributed/test_actor_checkpoint.py``."""
    monkeypatch.setattr(train, "_stages", lambda *_, **__: pytest.fail("nothing may start"))
    monkeypatch.setattr(train, "set_up_logs", lambda **_: None)
    flip(run / STEP / file)
    before = (run / "metrics.jsonl").read_bytes()
    for verify in ("full", "sizes"):
        with pytest.raises(CheckpointError, match=file):
            resume(run, verify=verify)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        lambda run: convert(["megatron-to-hf", str(run), str(run / "out"), "--no-verify"]),
        lambda run: dispatch.run(["evaluate", str(run), "--no-verify"]),
    ],
    ids=["convert", "evaluate"],
)
def test_no_verify_takes_it_and_says_so(run, caplog, command):
    flip(run / STEP / "__0_0.distcp")
    assert command(run) == 0
    assert f"{run / STEP} is NOT VERIFIED" in caplog.text


def test_a_lost_manifest_is_no_way_around(run, capsys):
    (run / STEP / "manifest.json").unlink()
    for reader in READERS.values():
        with pytest.raises(CheckpointError):
            reader(run)
    assert "has no manifest.json" in capsys.readouterr().err


def test_status_says_what_is_damaged(run, capsys):
    flip(run / STEP / "driver.json")
    dispatch.run(["status", str(run)])
    assert "driver.json has checksum" in capsys.readouterr().out
