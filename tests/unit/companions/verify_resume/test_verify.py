"""What verify-resume refuses, changes and shows."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from gtpo_megatron.cli import dispatch
from gtpo_megatron.companions.verify_resume import verify
from gtpo_megatron.companions.verify_resume.compare import Comparison
from gtpo_megatron.config.algorithm import OffPolicyConfig
from gtpo_megatron.config.output import LoggingConfig, ProfileConfig
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.group_scheduler import GroupScheduler, SchedulerRules
from recipes import tiny_cpu


def attempt(tmp_path, **changes):
    arguments = {"output": tmp_path / "out", "num_steps": 4, "kill_after": 2, "keep": False} | changes
    config = arguments.pop("config", None) or tiny_cpu.gtpo()
    return verify.verify_resume(config, console=Console(file=io.StringIO()), **arguments)


@pytest.mark.parametrize("kill_after", [0, 4, 7])
def test_a_kill_must_lie_within_the_run(tmp_path, kill_after):
    with pytest.raises(ConfigError, match=f"kill_after={kill_after}: must lie between 1 and steps - 1 = 3"):
        attempt(tmp_path, kill_after=kill_after)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty and not of an earlier verify-resume"):
        attempt(tmp_path, output=tmp_path)
    assert (tmp_path / "mine").exists()


def test_a_profile_past_the_scratch_run_is_left_out(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(verify, "compare_runs", lambda *_, **__: [])
    config = dataclasses.replace(tiny_cpu.gtpo(), profile=ProfileConfig(tool="torch", first_step=20, num_steps=2))
    attempt(tmp_path, config=config, keep=True)
    assert load_config(tmp_path / "out" / "config.yaml").profile == ProfileConfig()


class FakeRun:
    """Leaves a run folder at once."""

    def __init__(self, config_file, folder, *, output, resume):
        self.config = load_config(config_file)
        self.folder = folder
        self.calls.append((folder.name, resume))
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)

    def wait(self, on_step, *, until=None):
        on_step(1)
        if until is not None:
            assert not until()
            (self.folder / "checkpoints" / "latest").write_text(
                f"step_{self.config.checkpoint.every_steps}\n", encoding="utf-8"
            )
            assert until()

    def kill(self):
        self.calls.append(("kill", self.folder.name))


@pytest.fixture
def fake(monkeypatch):
    FakeRun.calls = []
    monkeypatch.setattr(verify, "TrainingProcess", FakeRun)
    return FakeRun


@pytest.mark.parametrize("is_equal", [True, False])
def test_three_runs_then_a_comparison_of_two(tmp_path, monkeypatch, fake, is_equal):
    result = Comparison(part="metrics", compared="3 rows", difference="" if is_equal else "step 3.x: 1 and 2")
    monkeypatch.setattr(verify, "compare_runs", lambda *_, **__: [result])
    assert attempt(tmp_path) == [result]
    assert [call for call in fake.calls if call[0] != "kill"] == [
        ("unbroken", False),
        ("resumed", False),
        ("resumed", True),
    ]
    assert (tmp_path / "out").exists() != is_equal, "runs that differ are left to look at"
    console = Console(file=io.StringIO(), width=120)
    assert verify.show([result], console, is_continuous=False) == is_equal
    text = console.file.getvalue()
    assert ("first difference, in metrics: step 3.x: 1 and 2" in text) != is_equal


def test_of_a_run_whose_bits_depend_on_the_clock_the_account_is_checked(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(verify, "last_checkpoint", lambda *_: tmp_path / "checkpoint")
    scheduler = GroupScheduler(
        SchedulerRules(
            **{"groups_per_step": 2, "group_size": 2, "max_staleness": 1, "over_sample": 2.0, "stragglers": "wait"},
            **{"max_concurrent": 8, "num_steps": 4},
        ),
        num_engines=1,
    )
    scheduler.add(range(5))
    for attempt_ in scheduler.dispatch(0)[:3]:
        scheduler.sampled(attempt_, 0)
        scheduler.graded(attempt_, is_kept=attempt_.group != 1)
    scheduler.take(1)
    state = scheduler.state_dict()
    run = tmp_path / "out" / "resumed"
    rows = [{"step": step} | counts(5, 2, 1, 2) for step in (1, 2, 3, 4)]

    def results(**changes):
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        torch.save({"scheduled": state | changes}, tmp_path / "checkpoint" / "rollouts.pt")
        original = fake.kill

        def kill(self):
            original(self)
            run.mkdir(parents=True, exist_ok=True)
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

        monkeypatch.setattr(fake, "kill", kill)
        config = tiny_cpu.gtpo()
        continuous = dataclasses.replace(
            config,
            rollout=dataclasses.replace(config.rollout, max_staleness=4, partial=True),
            algorithm=dataclasses.replace(config.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
        )
        return [found.difference for found in attempt(tmp_path, config=continuous, keep=True)]

    assert results() == ["", "", ""]
    assert ("unbroken", False) not in fake.calls
    assert "each once" in results(waiting=[3, 3])[2], "one is lost, another there twice"
    rows[2] = {"step": 3} | counts(5, 3, 1, 2)
    assert results()[1] == "step 3: drawn 5, but trained 3, dropped 1, under_way 2"
    del rows[2]
    assert results()[0] == "steps [1, 2, 4], expected 1 to 4"


def counts(drawn, trained, dropped, under_way):
    places = {"drawn": drawn, "trained": trained, "dropped": dropped, "under_way": under_way}
    return {f"prompts/{name}_count": count for name, count in places.items()}


def test_the_scratch_runs_save_where_they_are_killed_and_tell_nobody(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(verify, "compare_runs", lambda *_, **__: [])
    attempt(tmp_path, keep=True, num_steps=6, kill_after=3)
    config = load_config(tmp_path / "out" / "config.yaml")
    assert (config.num_steps, config.checkpoint.every_steps, config.checkpoint.export_hf) == (6, 3, True)
    assert config.logging.wandb_project is None
    attempt(tmp_path, keep=True)  # a folder of an earlier one is replaced


def test_no_logger_gets_the_scratch_runs(tmp_path, monkeypatch, fake):
    monkeypatch.setattr(verify, "compare_runs", lambda *_, **__: [])
    kept = {"log_level": "DEBUG", "rollout_groups_per_step": 3, "rollout_every_steps": 2}
    logging = LoggingConfig(
        **kept,
        tensorboard=True,
        wandb_project="mine",
        wandb_entity="me",
        wandb_mode="offline",
        sinks=("mine.py:Sink",),
        peak_tflops_per_rank=989.0,
    )
    for field in dataclasses.fields(LoggingConfig):
        assert getattr(logging, field.name) != field.default, f"{field.name} is to be in this test too"
    attempt(tmp_path, config=dataclasses.replace(tiny_cpu.gtpo(), logging=logging), keep=True)
    assert load_config(tmp_path / "out" / "config.yaml").logging == LoggingConfig(**kept)


def test_the_command_takes_a_run_folder(tmp_path, capsys):
    assert dispatch.run(["verify-resume", str(tmp_path)]) == 2
    assert "config.yaml: cannot be read" in capsys.readouterr().err
    assert dispatch.run(["verify-resume", "recipes.tiny_cpu:gtpo", "--kill-after", "9", "--output", str(tmp_path)]) == 2
    assert "kill_after=9" in capsys.readouterr().err
