"""What importing the workers' extension changes in vLLM."""

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's CPU build")
@pytest.mark.parametrize("is_neox_style", [False, True])
def test_heads_that_are_an_axis_of_their_own_are_rotated(is_neox_style):
    """As multi-latent attention gives them: a part of every query, and one key for all heads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from gtpo_megatron.rollout import vllm_worker

    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 128, 10000.0, is_neox_style, torch.float32)
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(7, 16)
    query = torch.randn(9, 4, 192, generator=generator)[..., 128:]
    key = torch.randn(9, 1, 576, generator=generator)[..., 512:]
    wanted = rotary.forward_native(positions, query.clone(), key.clone())
    found = rotary.forward_cpu(positions, query.clone(), key.clone())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    unmended = vllm_worker.RotaryEmbedding.forward_cpu.__wrapped__
    query, _ = unmended(rotary, positions, query.clone(), key.clone())
    assert (query - wanted[0]).abs().max() > 1  # or the mend is not needed any more
