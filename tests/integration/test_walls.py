"""What keeps the families of docs/model_families.md out that are not read: each wall still stands, with its message.

One that falls is a family that came nearer: its line in the document changes.
"""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(300)]

FOUND = (
    "import pathlib, megatron.core as core; "
    "texts = [path.read_text().lower() for path in pathlib.Path(core.__path__[0]).rglob('*.py')]; "
    "assert len(texts) > 100; assert any(name in text for text in texts for name in {}), 'nowhere in Megatron'"
)
SPARSE = (
    "from types import SimpleNamespace; from vllm.platforms.cpu import CpuPlatform; "
    "CpuPlatform.get_attn_backend_cls(None, SimpleNamespace(use_sparse=True))"
)
WALLS = {
    "granite4_nemotron": ("import megatron.core.ssm.mamba_mixer", "No module named 'triton'"),
    "deepseek_v3_2_glm5_in_megatron": (
        "from megatron.core.models.backends import LocalSpecProvider; LocalSpecProvider().linear()",
        "'LocalSpecProvider' object has no attribute 'linear'",
    ),
    "deepseek_v3_2_glm5_in_vllm": (SPARSE, "Sparse Attention is not supported on CPU"),
    "kimi_linear": (FOUND.format(("kimi", "kda")), "nowhere in Megatron"),
    "lfm2": (FOUND.format(("lfm2", "shortconv", "short_conv")), "nowhere in Megatron"),
    "qwen3_5": ("import vllm.model_executor.models.qwen3_5", "No module named 'torchvision'"),
}


@pytest.mark.parametrize("wall", WALLS)
def test_it_stands(wall):
    program, message = WALLS[wall]
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout
    assert message in ended.stderr.splitlines()[-1]
