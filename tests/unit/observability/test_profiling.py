"""A trace holds the steps that were asked for, by name, and nothing else."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from gtpo_megatron.config.output import ProfileConfig
from gtpo_megatron.observability import profiling
from gtpo_megatron.observability.profiling import StepProfiler, nsight_options

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


def run_steps(profiler, steps):
    for step in steps:
        profiler.step_begins(step)
        for name in ("score", "optimizer"):
            with profiler.stage(name, step=step):
                torch.ones(3).add_(1)
        profiler.step_done(step)


def names_of(path):
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def test_torch_traces_the_chosen_steps_of_the_chosen_ranks(tmp_path):
    config = ProfileConfig(tool="torch", first_step=2, num_steps=2, ranks=(0, 3))
    for rank in (0, 1, 3):
        run_steps(StepProfiler(config, rank=rank, run_folder=tmp_path), [1, 2, 3, 4])
    traces = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert traces == ["steps_000002_to_000003_rank_0.json.gz", "steps_000002_to_000003_rank_3.json.gz"]
    names = names_of(tmp_path / "profile" / traces[0])
    assert {name for name in names if name.startswith("step ")} == {
        f"step {step} {part}" for step in (2, 3) for part in ("score", "optimizer")
    }
    assert "aten::add_" in names


def test_a_run_that_ends_early_leaves_its_trace(tmp_path):
    profiler = StepProfiler(ProfileConfig(tool="torch", first_step=1, num_steps=9), rank=0, run_folder=tmp_path)
    run_steps(profiler, [1, 2])
    assert not (tmp_path / "profile").exists()
    profiler.close()
    (trace,) = (tmp_path / "profile").iterdir()
    assert "step 2 score" in names_of(trace)
    profiler.close()  # nothing left to end


@pytest.mark.parametrize("config", [ProfileConfig(), ProfileConfig(tool="torch", first_step=7)])
def test_nothing_is_written_without_being_asked_for(tmp_path, config):
    run_steps(StepProfiler(config, rank=0, run_folder=tmp_path), [1, 2])
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_past_the_traced_steps_traces_nothing(tmp_path):
    profiler = StepProfiler(ProfileConfig(tool="torch", first_step=2), rank=0, run_folder=tmp_path)
    with profiler.stage("send_weights", step=2):  # the push of the restored weights
        pass
    profiler.step_done(2)
    assert not list(tmp_path.iterdir())


def test_nsys_without_a_gpu_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger=profiling.__name__):
        profiler = StepProfiler(ProfileConfig(tool="nsys", first_step=1), rank=0, run_folder=tmp_path)
    assert "profile.tool='nsys' records nothing: there is no GPU" in caplog.text
    run_steps(profiler, [1])
    assert not list(tmp_path.iterdir())


def test_nsys_captures_between_start_and_stop_with_named_ranges(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    run_steps(StepProfiler(ProfileConfig(tool="nsys"), rank=0, run_folder=tmp_path), [1, 2, 3])
    assert calls == ["start", "step 2 score", "pop", "step 2 optimizer", "pop", "synchronize", "stop"]


def test_only_chosen_ranks_start_under_nsys():
    config = ProfileConfig(tool="nsys", ranks=(1,))
    assert nsight_options(config, rank=0, run_folder=Path("run")) is None
    assert nsight_options(ProfileConfig(tool="torch", ranks=(1,)), rank=1, run_folder=Path("run")) is None
    options = nsight_options(config, rank=1, run_folder=Path("/run"))
    assert options["o"] == "/run/profile/nsys_rank_1"
    assert options["capture-range"] == "cudaProfilerApi"
