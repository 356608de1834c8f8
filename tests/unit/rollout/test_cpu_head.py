"""Logits of an engine on a CPU: float32 of bfloat16 weights, by tiles; every other head is vLLM's own."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cpu_head():
    pytest.importorskip("vllm")
    from gtpo_megatron.rollout import cpu_head

    return cpu_head


@pytest.mark.parametrize("rows", [1, 8, 40, 41])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_logits_are_products_with_float32_sums(cpu_head, monkeypatch, rows, num_tokens):
    monkeypatch.setattr(cpu_head, "TILE_ELEMENTS", 8 * 96)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 96, generator=generator).bfloat16() for n in (num_tokens, rows))
    logits = cpu_head.float32_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert logits.shape == (num_tokens, rows)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "hidden", "weight", "has_bias", "is_ours"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16, False, True),
        (torch.float32, torch.bfloat16, None, False, False),
        (torch.float32, torch.bfloat16, torch.bfloat16, True, False),
        (torch.float32, torch.float32, torch.float32, False, False),
        (torch.float32, torch.bfloat16, torch.int8, False, False),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, False, False),
        (None, torch.bfloat16, torch.bfloat16, False, False),
    ],
)
def test_only_a_float32_head_of_bfloat16_weights_is_ours(
    cpu_head, monkeypatch, head, hidden, weight, has_bias, is_ours
):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    monkeypatch.setattr(LogitsProcessor, "_apply_head", lambda *_: "vLLM's")
    cpu_head.install.__wrapped__()
    # None: of a quantized layer, which vLLM refuses
    method = object() if weight is None else UnquantizedEmbeddingMethod()
    layer = SimpleNamespace(weight=torch.ones(3, 4).to(weight or torch.bfloat16), quant_method=method)
    bias = torch.zeros(3) if has_bias else None
    found = LogitsProcessor._apply_head(SimpleNamespace(head_dtype=head), layer, torch.ones(2, 4).to(hidden), bias)
    assert torch.equal(found, torch.full((2, 3), 4.0)) if is_ours else found == "vLLM's"
