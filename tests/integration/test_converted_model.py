"""A run that starts from a converted folder, on real Megatron-core and vLLM."""

import pytest
import torch
from safetensors.torch import load_file

from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run, steps
from tools.convert_checkpoint import main

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # torch's checkpoint warns of deprecations of its own
]


ONE_PROCESS = ("--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1")


def test_training_does_not_depend_on_the_format_it_starts_from(tmp_path):
    """Row by row; vLLM, which cannot read a converted folder, has its weights from the first push. And what the run
    exports is what its last checkpoint converts to."""
    assert main(["hf-to-megatron", str(ASSETS / "tiny_qwen2"), str(tmp_path / "converted")]) == 0
    plain = Run(tmp_path / "plain", *ONE_PROCESS)
    plain.succeed()
    converted = Run(tmp_path / "run", "--model.path", str(tmp_path / "converted"), *ONE_PROCESS)
    converted.succeed()
    assert steps(converted.folder) == steps(plain.folder)
    assert main(["megatron-to-hf", str(converted.folder), str(tmp_path / "back")]) == 0
    exported, back = (load_file(path / "model.safetensors") for path in (converted.folder / "hf", tmp_path / "back"))
    assert exported.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in exported.items())
    assert not torch.equal(
        back["model.norm.weight"], load_file(ASSETS / "tiny_qwen2" / "model.safetensors")["model.norm.weight"]
    )
