"""The first difference between two runs is named; equal means every bit."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gtpo_megatron.companions.verify_resume.compare import (
    compare_checkpoints,
    compare_runs,
    compare_sampled_ahead,
    first_difference,
)
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.metrics_file import JsonlSink

NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": [1, 2.5, None]}, {"a": [1, 2.5, None]}, ""),
        ({"a": [1, 2.5]}, {"a": [1, 2.25]}, "x.a[1]: 2.5 and 2.25"),
        ({"a": 1}, {"b": 1}, "x: keys ['a'] and ['b']"),
        ([1], [1, 2], "x: 1 and 2 entries"),
        (1, 1.0, "x: int and float"),
        (NAN, NAN, ""),
        (0.0, -0.0, "x: 0.0 and -0.0"),
        (np.array([1, 2]), np.array([1, 3]), "x: arrays differ"),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), ""),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]), "x[0, 1]: 2.0 and 3.0"),
        (torch.tensor([NAN, 0.0]), torch.tensor([NAN, -0.0]), "x[1]: 0.0 and -0.0"),
        (torch.tensor([NAN]), torch.tensor([NAN]), ""),
        (torch.tensor(2.0), torch.tensor(3.0), "x[]: 2.0 and 3.0"),
        (torch.ones(2), torch.ones(3), "x: (2,) torch.float32 and (3,) torch.float32"),
        (torch.ones(2), torch.ones(2).double(), "x: (2,) torch.float32 and (2,) torch.float64"),
        (torch.ones(3, dtype=torch.bfloat16), torch.tensor([1, 1, 1.5]).bfloat16(), "x[2]: 1.0 and 1.5"),
    ],
)
def test_first_difference(left, right, found):
    assert first_difference(left, right, "x") == found


def test_the_last_bit_counts():
    value = 0.1
    assert "x[0]" in first_difference(
        torch.tensor([value], dtype=torch.float64),
        torch.tensor([math.nextafter(value, 1)], dtype=torch.float64),
        "x",
    )


def write_run(folder, *, loss=0.5, seconds=1.0, weight=1.0, steps=2):
    folder.mkdir(exist_ok=True)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(steps + 1):
        sink.write(step, {"policy/loss": loss * step, "timing/step_s": seconds})
    sink.close()
    (folder / "hf").mkdir()
    save_file({"a": torch.ones(2, 3), "b": torch.full((4,), weight)}, folder / "hf" / "model.safetensors")
    return folder


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Metrics and exports of two runs whose checkpoints are equal."""
    monkeypatch.setattr("gtpo_megatron.companions.verify_resume.compare.compare_checkpoints", lambda *_, **__: iter(()))
    monkeypatch.setattr("gtpo_megatron.companions.verify_resume.compare.last_checkpoint", lambda run, _: run)

    def compare(**changes):
        left = write_run(tmp_path / "left", seconds=2.0)
        return list(compare_runs(left, write_run(tmp_path / "right", **changes)))

    return compare


def test_times_may_differ(compare):
    metrics, export = compare()
    assert (metrics.is_equal, metrics.compared) == (True, "3 rows, 3 values")
    assert (export.is_equal, export.compared) == (True, "2 tensors")


def test_a_metric_is_named_by_step(compare):
    metrics, _ = compare(loss=0.25)
    assert metrics.difference == "step 1.policy/loss: 0.5 and 0.25"


def test_a_missing_step_is_named(compare):
    metrics, _ = compare(steps=1)
    assert metrics.difference == "steps: 3 and 2 entries"


def test_an_exported_tensor_is_named(compare):
    _, export = compare(weight=2.0)
    assert export.difference == "b[0]: 1.0 and 2.0"


def test_responses_sampled_ahead_are_compared_where_there_are_any(compare, tmp_path):
    for folder, token in (("left", 3), ("right", 4)):
        (tmp_path / folder).mkdir()
        ready = {5: {"rollouts": {"response_ids": torch.tensor([[1, token]])}}}
        torch.save({"started": 5, "ready": ready}, tmp_path / folder / "rollouts.pt")
    *_, ahead = compare()
    assert ahead.compared == "1 steps"
    assert ahead.difference == "rollouts.ready.5.rollouts.response_ids[0, 1]: 3 and 4"
    (tmp_path / "right" / "rollouts.pt").unlink()
    found = compare_sampled_ahead(tmp_path / "left" / "rollouts.pt", tmp_path / "right" / "rollouts.pt")
    assert found.difference == "rollouts: dict and NoneType"


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no manifest.json"):
        list(compare_checkpoints(tmp_path, tmp_path))
    with pytest.raises(CheckpointError, match=r"\.metadata: .*no such file"):
        list(compare_checkpoints(tmp_path, tmp_path, verify="none"))
