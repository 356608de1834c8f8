"""Whole runs that train adapters: pushed merged or alone, resumed, converted; their log-probs are vLLM's."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from gtpo_megatron.cli.convert import run as convert
from gtpo_megatron.run_folder.checkpoints import LATEST
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.weights.adapters import projections
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.peft import write_peft_folder
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run, steps

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


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """The options of a run that begins with adapters of somebody's, and pushes merged weights; and the run."""
    begun = tmp_path_factory.mktemp("adapters") / "begun"
    begun.mkdir()
    torch.manual_seed(0)
    arch = read_architecture(ASSETS / "tiny_qwen2")
    adapters = {
        one.name: (torch.randn(6, one.columns) / 50, torch.randn(one.rows, 6) / 50) for one in projections(arch)
    }
    write_peft_folder(begun, adapters, base="tiny_qwen2", scale=32 / 6)
    options = (*ADAPTERS, *LAYOUT, *MEASURES, "--adapter.push", "merged", "--adapter.path", str(begun))
    run = Run(begun.parent / "run", *options, num_steps=4)
    run.succeed()
    shutil.rmtree(begun)  # a resumed run does without
    return options, run


@pytest.mark.nightly
def test_a_run_that_pushes_merged_weights(merged, tmp_path):
    _, run = merged
    assert_gaps(run, 4)
    assert_leaves_adapters(run, tmp_path / "peft")


def test_a_run_that_pushes_adapters(tmp_path):
    workers = ("--rollout.tensor-parallel-size", "2")
    run = Run(tmp_path / "run", *ADAPTERS, *LAYOUT, *MEASURES, *workers, "--adapter.push", "adapters", num_steps=3)
    run.succeed()
    assert_gaps(run, 3)
    assert_leaves_adapters(run, tmp_path / "peft")


def assert_leaves_adapters(run, peft):
    """Adapters alone in checkpoints, and exports that are the frozen weights and ``s B A``."""
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in run.folder.glob("checkpoints/step_*")]
    assert sizes
    assert max(sizes) < 3 << 20  # all weights with their moments are 13 MiB
    assert convert(["megatron-to-peft", str(run.folder), str(peft)]) == 0
    said = json.loads((peft / "adapter_config.json").read_text())
    assert said["r"] == 6
    base, exported = (load_file(folder / "model.safetensors") for folder in (ASSETS / "tiny_qwen2", run.folder / "hf"))
    adapters = load_file(peft / "adapter_model.safetensors")
    assert base.keys() == exported.keys()
    for name, weight in base.items():
        a, b = (adapters.get(f"base_model.model.{name[:-7]}.lora_{part}.weight") for part in "AB")
        wanted = weight if a is None else weight + said["lora_alpha"] / 6 * (b @ a)
        torch.testing.assert_close(exported[name], wanted, rtol=0, atol=1e-6)
        assert (a is None) == torch.equal(exported[name], weight)


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


@pytest.mark.nightly
def test_a_resumed_run_goes_on_from_its_adapters(merged, tmp_path):
    """From the checkpoint before the last; the folder that the run began with is gone."""
    options, whole = merged
    folder = tmp_path / "resumed"
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "hf")
    shutil.rmtree(folder / "checkpoints" / "step_4")
    (folder / "checkpoints" / LATEST).write_text("step_2\n", encoding="utf-8")
    resumed = Run(folder, *options, "--resume", num_steps=4)
    resumed.succeed()
    assert re.findall(r"^step (\d)/", resumed.output, re.MULTILINE) == ["3", "4"]
    assert steps(folder) == steps(whole.folder)
    left, right = (load_file(run / "hf" / "model.safetensors") for run in (whole.folder, folder))
    assert all(torch.equal(left[name], right[name]) for name in left)
