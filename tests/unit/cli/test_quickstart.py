"""``gtpo-megatron quickstart``: which folder it replaces. The run itself is tests/integration/test_wheel.py's."""

import pytest

from gtpo_megatron import train as training
from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.orchestration.loop.controller import RunSummary
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder.state import LOCK_FILE
from recipes import tiny_cpu


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The runs that were started, in an empty folder."""
    runs = []

    def train(config, *, run_dir, resume, console, servers):
        runs.append((config, str(run_dir), resume))
        return RunSummary(before=None, after=None)

    monkeypatch.setattr(training, "train", train)
    monkeypatch.chdir(tmp_path)
    return runs


def earlier_run(folder, config):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")


def test_the_tiny_recipe_with_any_override(trained):
    assert dispatch.run(["quickstart", "--num-steps", "3", "--algorithm.alpha2", "0.2"]) == 0
    [(config, run_dir, resume)] = trained
    assert (config.name, config.num_steps, config.algorithm.alpha2) == ("tiny_cpu_gtpo", 3, 0.2)
    assert (run_dir, resume) == ("runs/quickstart", False)


@pytest.mark.slow
@pytest.mark.parametrize("given", [(), ("--run-dir", "runs/quickstart")])
def test_it_begins_anew_each_time(trained, tmp_path, given):
    earlier_run(tmp_path / "runs/quickstart", tiny_cpu.gtpo(num_steps=3))
    assert dispatch.run(["quickstart", *given]) == 0
    assert not (tmp_path / "runs/quickstart").exists()


@pytest.mark.parametrize("given", [("--resume",), ("--run-dir", "runs/quickstart/../quickstart2")])
def test_a_run_that_goes_on_or_another_folder_is_left_alone(trained, tmp_path, given):
    for name in ("quickstart", "quickstart2"):
        earlier_run(tmp_path / "runs" / name, tiny_cpu.gtpo())
    assert dispatch.run(["quickstart", *given]) == 0
    assert (tmp_path / "runs/quickstart/metrics.jsonl").exists()
    assert (tmp_path / "runs/quickstart2/metrics.jsonl").exists()


def test_nothing_else_is_ever_removed(trained, tmp_path, capsys):
    folder = tmp_path / "runs/quickstart"
    earlier_run(folder, tiny_cpu.dapo())
    assert dispatch.run(["quickstart"]) == 2
    assert "runs/quickstart holds something other than the run of a quickstart" in capsys.readouterr().err
    (folder / "config.yaml").unlink()
    assert dispatch.run(["quickstart"]) == 2
    assert (folder / "metrics.jsonl").exists()
    assert not trained


def test_a_running_quickstart_is_left_alone(trained, tmp_path, capsys):
    folder = tmp_path / "runs/quickstart"
    earlier_run(folder, tiny_cpu.gtpo())
    held = held_locks.acquire(folder / LOCK_FILE, patience_s=0.0)
    assert held is not None
    try:
        assert dispatch.run(["quickstart"]) == 2
    finally:
        held_locks.let_go(held)
    assert "runs/quickstart is in use" in capsys.readouterr().err
    assert not trained
