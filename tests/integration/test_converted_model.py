"""Runs in one process without Ray, on real Megatron-core and vLLM: from a Hugging Face folder and a converted one."""

import pytest
import torch
from safetensors.torch import load_file

from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run, steps
from tools.convert_checkpoint import main

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("one process"),
    pytest.mark.filterwarnings("ignore"),  # torch's checkpoint warns of deprecations of its own
]


def one_process(folder, *options):
    """With dynamic sampling and a reward without a verdict on some rows."""
    run = Run(
        folder,
        *("--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1"),
        *("--reward.function", "tests.integration.moody_reward:moody", "--algorithm.dynamic-sampling.max-refills", "3"),
        *options,
        recipe="recipes.tiny_cpu:dapo",
    )
    run.succeed()
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return one_process(tmp_path_factory.mktemp("plain") / "run")


def test_the_same_step_over_the_same_classes(plain):
    rows = steps(plain.folder)[1:]
    assert sum(row["rollout/reward_failed_count"] for row in rows) > 0
    # 4 prompts a step and what replaced the dropped ones, 4 responses each
    for row in rows:
        assert row["rollout/responses_count"] >= 16
        drawn = row["rollout/responses_count"] / 4
        assert 0 <= row["rollout/groups_dropped_count"] < drawn


def test_training_does_not_depend_on_the_format_it_starts_from(plain, tmp_path):
    """Row by row; vLLM, which cannot read a converted folder, has its weights from the first push. And what the run
    exports is what its last checkpoint converts to."""
    assert main(["hf-to-megatron", str(ASSETS / "tiny_qwen2"), str(tmp_path / "converted")]) == 0
    converted = one_process(tmp_path / "run", "--model.path", str(tmp_path / "converted"))
    assert steps(converted.folder) == steps(plain.folder)
    assert main(["megatron-to-hf", str(converted.folder), str(tmp_path / "back")]) == 0
    exported, back = (load_file(path / "model.safetensors") for path in (converted.folder / "hf", tmp_path / "back"))
    assert exported.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in exported.items())
    assert not torch.equal(
        back["model.norm.weight"], load_file(ASSETS / "tiny_qwen2" / "model.safetensors")["model.norm.weight"]
    )
