"""What ``train`` does around a run; whole runs are in tests/integration."""

import dataclasses
import io
import json
import os
import signal
from contextlib import contextmanager, nullcontext

import pytest
from rich.console import Console

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.errors import CheckpointError, ConfigError, RolloutError
from gtpo_megatron.run_folder.checkpoints import DriverState
from gtpo_megatron.run_folder.folder import RunFolder, read_contents
from gtpo_megatron.run_folder.state import read_state
from recipes import tiny_cpu
from tests.unit.orchestration import checkpoints

TRAIN, HELDOUT = ("1+1?", "2+2?", "3+3?"), ("4+4?", "5+5?")


class StartedError(Exception):
    """Instead of processes: all that comes before them went well."""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a run on these questions, or goes on with it, up to the start of its processes; then saves ``step``."""

    def write(name, questions):
        rows = [json.dumps({"prompt": question, "answer": "1"}) for question in questions]
        (tmp_path / name).write_text("\n".join(rows), encoding="utf-8")
        return str(tmp_path / name)

    def started(*_, inspector=None):
        raise StartedError

    def begin(train_questions, heldout_questions, *, resume=True, step=0, ends=StartedError, **fields):
        config = dataclasses.replace(tiny_cpu.gtpo(), **fields)
        data = dataclasses.replace(config.data, train_path=write("train.jsonl", train_questions), prompts_per_step=2)
        heldout = dataclasses.replace(config.evaluation, path=write("heldout.jsonl", heldout_questions))
        config = dataclasses.replace(config, data=data, evaluation=heldout)
        with pytest.raises(ends) if ends else nullcontext():
            summary = train.train(config, run_dir=tmp_path / "run", resume=resume, console=Console(file=io.StringIO()))
        if not ends:
            return summary
        if step:
            sampler = train.prompt_sampler(config, train.check_inputs(config))
            monkeypatch.setattr(
                checkpoints,
                "state",
                lambda step: DriverState(
                    step=step, sampler=sampler.state_dict(), counters={}, mismatch={"samples": []}
                ),
            )
            checkpoints.save(RunFolder(tmp_path / "run").checkpoints, step)
        return read_contents(tmp_path / "run")

    monkeypatch.setattr(train, "_stages", started)
    monkeypatch.setattr(train, "set_up_logs", lambda **_: None)  # this process's logs stay as they are
    return begin


def test_other_problems_than_those_of_the_checkpoint_are_refused_before_any_process(begin, tmp_path):
    first = begin(TRAIN, HELDOUT, resume=False, step=2)
    assert list(first) == ["train", "eval/heldout"]
    with pytest.raises(CheckpointError, match="sampler state of another run: its fingerprint"):
        begin(("1+1?", "2+2?", "3+4?"), HELDOUT)
    with pytest.raises(ConfigError, match="measured on other problems: eval/heldout was "):
        begin(TRAIN, ("4+4?", "5+6?"))
    assert begin(TRAIN, HELDOUT) == first, "what is refused leaves no trace"


def test_a_folder_without_a_run_is_begun_by_the_rules_of_new_runs(begin, tmp_path):
    """A launcher asks for a resume whatever there is."""
    with pytest.raises(ConfigError, match="would train 1 of"):
        begin(TRAIN, HELDOUT, resume=True, update=UpdateConfig(mini_batch_prompts=1, updates_per_rollout=1))
    assert not (tmp_path / "run").exists()


def test_an_older_run_with_other_problems_does_not_leave_them_as_its_own(begin, tmp_path):
    first = begin(TRAIN, HELDOUT, resume=False, step=2)
    (tmp_path / "run" / "data.json").unlink()
    with pytest.raises(CheckpointError, match="sampler state of another run"):
        begin(("1+1?", "2+2?", "3+4?"), HELDOUT)
    assert not (tmp_path / "run" / "data.json").exists()
    assert begin(TRAIN, HELDOUT) == first


def test_a_run_that_has_saved_nothing_takes_other_problems(begin):
    first = begin(TRAIN, HELDOUT, resume=False)
    second = begin(("6+6?", "7+7?"), ("8+8?",))
    assert all(second[name] != first[name] for name in first)


@pytest.mark.parametrize(
    ("saved", "said"),
    [(0, "there is no checkpoint yet: steps 1 to 3,"), (2, "the last checkpoint is of step 2: step 3")],
)
def test_steps_that_are_done_again_are_said(begin, tmp_path, caplog, saved, said):
    begin(TRAIN, HELDOUT, resume=False, step=saved)
    metrics = "".join(json.dumps({"step": step}) + "\n" for step in range(4))
    (tmp_path / "run" / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    with caplog.at_level("INFO", logger="gtpo_megatron.train"):
        begin(TRAIN, HELDOUT)
    assert said in caplog.text


def test_a_folder_without_a_run_is_said(begin, caplog, tmp_path):
    """As a mistyped folder is."""
    with caplog.at_level("INFO", logger="gtpo_megatron.train"):
        begin(TRAIN, HELDOUT)
    assert f"there is nothing to resume in {tmp_path / 'run'}: the run begins anew" in caplog.text


@pytest.mark.parametrize("saved", [0, 2])
def test_options_that_sum_otherwise_are_said_where_there_is_a_checkpoint(begin, caplog, saved):
    begin(TRAIN, HELDOUT, resume=False, step=saved)
    with caplog.at_level("INFO", logger="gtpo_megatron.train"):
        begin(TRAIN, HELDOUT, update=dataclasses.replace(tiny_cpu.gtpo().update, micro_batch_tokens=512))
    said = "OTHER OPTIONS THAN AT THE LAST START (update.micro_batch_tokens: 8192 -> 512): sums round in another order"
    assert (said in caplog.text) == (saved > 0)


def test_a_failure_that_refers_to_the_log_quotes_it_and_so_does_the_status(begin, tmp_path, monkeypatch, capsys):
    def failing(*_, inspector=None):
        where = "[reward] gtpo_megatron.orchestration.stages.grading"
        line = f"2026-01-01 10:00:00,000 ERROR   {where}: 16 of 16 responses have no reward"
        with (tmp_path / "run" / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{line}: 16 x TypeError: mine() got 'solution'\n")
        raise RolloutError("the reward function has no verdict on any of 16 responses; log.txt says what it raised")

    monkeypatch.setattr(train, "_stages", failing)
    with pytest.raises(RolloutError, match=r"what it raised; its last error: \[reward\].*16 x TypeError: mine\(\) got"):
        begin(TRAIN, HELDOUT, resume=False, ends=None)
    assert dispatch.run(["status", str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "16 x TypeError: mine() got 'solution'" in next(line for line in lines if line.startswith("state"))


def test_after_a_failed_start_the_corrected_command_begins_anew(begin, tmp_path):
    begin(TRAIN, HELDOUT, resume=False)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    begin(TRAIN, ("8+8?",), resume=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8") == "", "each step has one row"


@pytest.fixture
def told(begin, monkeypatch):
    """What a run of ``begin`` to its last step tells: its processes, its steps, the export."""
    said = []

    @contextmanager
    def processes(*_, inspector=None):
        said.append("processes begin")
        try:
            yield None
        finally:
            said.append("processes end")

    class Steps:
        def __init__(self, *_, stop_reason):
            pass

        def run(self, checkpoint):
            said.append("steps")
            return train.RunSummary(before=None, after=())

    monkeypatch.setattr(train, "Controller", Steps)
    monkeypatch.setattr(train, "export", lambda *_: said.append("export"))
    monkeypatch.setattr(train, "_stages", processes)  # in place of those of ``begin``
    return said


def test_the_export_begins_when_no_process_holds_a_gpu_any_more(begin, told, tmp_path):
    begin(TRAIN, HELDOUT, resume=False, ends=None)
    assert told == ["processes begin", "steps", "processes end", "export"]
    assert read_state(tmp_path / "run").outcome == "finished"


def test_a_failed_export_is_how_the_run_ended(begin, told, tmp_path, monkeypatch):
    def full(*_):
        raise CheckpointError("no room for the export")

    monkeypatch.setattr(train, "export", full)
    begin(TRAIN, HELDOUT, resume=False, ends=CheckpointError)
    assert told == ["processes begin", "steps", "processes end"]
    assert read_state(tmp_path / "run").outcome == "CheckpointError: no room for the export"


@pytest.mark.parametrize("step", [0, 2])
def test_a_signal_while_processes_start_stops_the_run_at_once(begin, tmp_path, monkeypatch, step):
    """Ray's own handler would end the driver with a status that tells nobody to go on."""

    def starting(*_, inspector=None):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("nothing has begun that is to be finished")

    begin(TRAIN, HELDOUT, resume=False, step=step)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "_stages", starting)
    summary = begin(TRAIN, HELDOUT, ends=None)
    assert (summary.stopped_after, summary.stop_reason) == (step, "SIGTERM")
    assert read_state(tmp_path / "run").outcome == f"stopped after step {step}: SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
