"""A warm start on real Megatron ranks: it learns, resumes to the bit, and ``train`` goes on from its folder."""

import re
import shutil

import pytest
import torch

from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.weights.hf.reader import WeightFolder
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]

NUM_STEPS = 6
LEARNS = ("--optimizer.learning-rate", "3e-4", "--optimizer.schedule", "constant", "--optimizer.warmup-updates", "0")
ONE_PROCESS = ("--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1")


def sft(folder, *overrides, recipe="recipes.tiny_cpu:sft", num_steps=NUM_STEPS):
    return Run(folder, *LEARNS, *overrides, recipe=recipe, command="sft", num_steps=num_steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A warm start that nobody disturbs, of one rank in one process."""
    run = sft(tmp_path_factory.mktemp("sft") / "whole", *ONE_PROCESS)
    run.succeed()
    return run


def test_it_learns_and_leaves_a_whole_run_folder(whole):
    names = {path.name.split(".")[0] for path in whole.folder.iterdir()}
    assert names >= {"config", "data", "metrics", "events", "checkpoints", "hf", "report", "log"}
    rows = read_metrics(whole.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    held = {row["step"]: row["sft/heldout_loss"] for row in rows if "sft/heldout_loss" in row}
    assert list(held) == [0, 2, 4, 6]
    assert held[6] < held[0]
    assert re.search(r"held-out loss: 0\.\d{4} -> 0\.\d{4} nats per token", whole.output)
    for row in rows[1:]:
        assert row["optimizer/grad_norm"] > 0
        assert 0 < row["sft/trained_tokens_count"] < row["sft/tokens_count"]
        assert row["throughput/tokens_per_s"] > 0
    assert "</html>" in (whole.folder / "report.html").read_text(encoding="utf-8")


def test_ranks_on_ray_learn_the_same_without_an_engine(whole, tmp_path):
    run = sft(tmp_path / "run", num_steps=2)
    run.succeed()
    mine, others = steps(run.folder), steps(whole.folder)
    for row, other in zip(mine, others, strict=False):
        for name in ("sft/loss", "sft/heldout_loss", "optimizer/grad_norm"):
            assert row.get(name) == pytest.approx(other.get(name), rel=1e-4)
    log = (run.folder / "log.txt").read_text(encoding="utf-8")
    assert "rank 1: process" in log
    assert "rollout engine: process" not in log
    assert "reward process: process" not in log


def test_killed_and_resumed_it_equals_an_unbroken_one(whole, tmp_path):
    broken = sft(tmp_path / "broken", *ONE_PROCESS)
    broken.wait_for(r"step_2 is complete")
    broken.kill()
    resumed = sft(tmp_path / "broken", "--resume", *ONE_PROCESS)
    resumed.succeed()
    assert re.findall(r"^step (\d)/", resumed.output, re.MULTILINE)[-2:] == ["5", "6"]
    assert not re.search(r"^step 1/", resumed.output, re.MULTILINE)
    assert steps(tmp_path / "broken") == steps(whole.folder)
    for mine, others in zip(weights(tmp_path / "broken"), weights(whole.folder), strict=True):
        assert torch.equal(mine, others)


def weights(folder):
    with WeightFolder(folder / "hf") as found:
        return [found.whole(name).clone() for name in sorted(found.tensors)]


def test_train_goes_on_from_its_folder(whole, tmp_path):
    run = Run(tmp_path / "run", "--model.path", str(whole.folder / "hf"), num_steps=1)
    run.succeed()
    assert "after:  held-out mean@2" in run.output


@pytest.mark.nightly
def test_adapters_are_warmed_and_trained_further(tmp_path):
    run = sft(tmp_path / "sft", *ONE_PROCESS, "--optimizer.learning-rate", "5e-3", recipe="recipes.tiny_cpu:sft_lora")
    run.succeed()
    held = [row["sft/heldout_loss"] for row in read_metrics(run.folder / "metrics.jsonl") if "sft/heldout_loss" in row]
    assert held[-1] < held[0]
    hint = re.search(r"(--adapter\.path \S+ --adapter\.rank 16 --adapter\.alpha 32)", run.output.replace("\n", " "))
    assert hint is not None
    moved = tmp_path / "adapter"
    shutil.copytree(run.folder / "adapter", moved)
    options = ("--adapter.path", str(moved), "--model.path", str(ASSETS / "tiny_qwen2"))
    further = Run(tmp_path / "run", *options, recipe="recipes.tiny_cpu:gtpo_lora", num_steps=1)
    further.succeed()
    assert "after:  held-out mean@2" in further.output
