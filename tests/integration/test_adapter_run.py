"""Whole runs that train adapters: pushed merged or alone, resumed, converted; their log-probs are vLLM's."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from gtpo_megatron.cli.convert import run as convert
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.weights.adapters import projections
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.peft import write_peft_folder
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]

ADAPTERS = ("--adapter.rank", "6", "--optimizer.learning-rate", "1e-2", "--weight-sync.verify-every-steps", "1")
LAYOUT = ("--parallel.tensor-parallel-size", "2", "--parallel.sequence-parallel")
MEASURES = ("--checkpoint.export-hf",)


def assert_gaps(run, num_steps):
    rows = read_metrics(run.folder / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert all(0 < row["sync/logprob_gap_max"] <= 1e-4 for row in rows)
    return rows


@pytest.mark.parametrize("push", ["merged", "adapters"])
def test_a_run_of_adapters(tmp_path, push):
    """What it leaves: adapters alone in checkpoints, and exports that are the frozen weights and ``s B A``."""
    workers = ("--rollout.tensor-parallel-size", "2") if push == "adapters" else ()
    run = Run(tmp_path / "run", *ADAPTERS, *LAYOUT, *MEASURES, *workers, "--adapter.push", push, num_steps=3)
    run.succeed()
    assert_gaps(run, 3)
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in run.folder.glob("checkpoints/step_*")]
    assert sizes
    assert max(sizes) < 3 << 20  # all weights with their moments are 13 MiB
    assert convert(["megatron-to-peft", str(run.folder), str(tmp_path / "peft")]) == 0
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert said["r"] == 6
    base, merged = (load_file(folder / "model.safetensors") for folder in (ASSETS / "tiny_qwen2", run.folder / "hf"))
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        a, b = (adapters.get(f"base_model.model.{name[:-7]}.lora_{part}.weight") for part in "AB")
        wanted = weight if a is None else weight + said["lora_alpha"] / 6 * (b @ a)
        torch.testing.assert_close(merged[name], wanted, rtol=0, atol=1e-6)
        assert (a is None) == torch.equal(merged[name], weight)


@pytest.mark.nightly
def test_adapters_alone_reach_responses_that_are_being_sampled(tmp_path):
    """The continuous pipeline: a push changes the adapters below requests in flight."""
    run = Run(
        tmp_path / "run",
        *(*ADAPTERS, *MEASURES, "--adapter.push", "adapters", "--algorithm.off-policy.mode", "truncate"),
        *("--rollout.max-staleness", "2", "--rollout.partial", "--rollout.over-sample", "2"),
        num_steps=4,
    )
    run.succeed()
    assert [row["step"] for row in read_metrics(run.folder / "metrics.jsonl")[1:]] == [1, 2, 3, 4]


def test_a_killed_run_goes_on_from_its_adapters(tmp_path):
    """The folder that it began with is gone by then."""
    begun = tmp_path / "begun"
    begun.mkdir()
    arch = read_architecture(ASSETS / "tiny_qwen2")
    adapters = {
        one.name: (torch.randn(6, one.columns) / 50, torch.randn(one.rows, 6) / 50) for one in projections(arch)
    }
    write_peft_folder(begun, adapters, base="tiny_qwen2", scale=32 / 6)
    options = (*ADAPTERS, *MEASURES, "--adapter.path", str(begun))
    whole = Run(tmp_path / "whole", *options, num_steps=4)
    whole.succeed()
    halved = Run(tmp_path / "halved", *options, num_steps=2)
    halved.succeed()
    shutil.rmtree(begun)
    resumed = Run(tmp_path / "halved", *options, "--resume", num_steps=4)
    resumed.succeed()
    left, right = (load_file(run.folder / "hf" / "model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(left[name], right[name]) for name in left)
