"""Whole runs with a teacher: the student comes nearer to it, and a resumed run repeats to the bit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo_megatron.run_folder.metrics_file import read_metrics
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import SMALL

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 6
NOISE = 0.08
OPTIONS = (
    *SMALL,
    *("--data.prompts-per-step", "8"),
    *("--rollout.group-size", "8"),
    *("--rollout.sampling.max-response-tokens", "40"),
    *("--optimizer.learning-rate", "2e-3"),
    *("--optimizer.warmup-updates", "0"),
)


def forgetful(folder):
    """The quickstart's model with noise on its weights: it has much to learn that its teacher knows."""
    shutil.copytree(ASSETS / "tiny_qwen2", folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor.add_(NOISE * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.nightly
def test_the_student_comes_nearer_and_a_resume_repeats(tmp_path):
    """A dense student, a mixture of experts as its teacher; killed in the middle of the run, and resumed."""
    output = tmp_path / "proof"
    command = [str(Path(sys.executable).with_name("gtpo-megatron")), "verify-resume", "recipes.tiny_cpu:distill"]
    command += [*OPTIONS, "--model.path", str(forgetful(tmp_path / "student"))]
    command += ["--steps", str(STEPS), "--kill-after", "3", "--output", str(output), "--keep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [row for row in read_metrics(output / "unbroken" / "metrics.jsonl") if "policy/kl_teacher_nats" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    distances = [row["policy/kl_teacher_nats"] for row in rows]
    assert 0 < sum(distances[-2:]) < 0.7 * sum(distances[:2]), distances
    assert all(row["timing/actor_teacher_s"] > 0 for row in rows)
