"""The fused output layer on an NVIDIA GPU: Triton kernels, bfloat16 products, memory."""

import importlib.util

import pytest
import torch

from gtpo_megatron.distributed import tiled_scores
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores, token_scores
from gtpo_megatron.kernels import tiles
from tests.reference.vocab_scores import dense_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def _problem(dtype, tokens=300, hidden=256, vocab=40_000):
    torch.manual_seed(0)
    h = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    w = (torch.randn(vocab, hidden, device="cuda") * 0.2).to(dtype)
    return h, w, torch.randint(0, vocab - 50, (tokens,), device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_fused_layer_equals_dense_float64(dtype, entropy_grad):
    h, w, targets = _problem(dtype)
    assert tiles.kernels_for(h) is not tiles.TORCH_KERNELS
    vocab, temperature = w.shape[0] - 50, torch.linspace(0.5, 1.5, len(h), device="cuda")
    wide_h, wide_w = h.double().requires_grad_(), w.double().requires_grad_()
    want = dense_scores(wide_h @ wide_w.T, targets, temperature, vocab)
    (want.logprobs.sum() + entropy_grad * want.entropy.sum()).backward()
    h.requires_grad_()
    w.requires_grad_()
    got = linear_token_scores(h, w, targets, None, temperature, vocab, entropy_grad, 128)
    (got.logprobs.sum() + (got.entropy.sum() if entropy_grad else 0)).backward()
    # float32 products may run in TF32 only where the caller allowed it; bfloat16 ones accumulate in float32.
    torch.testing.assert_close(got.logprobs.double(), want.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-4, atol=1e-4)
    relative = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for mine, wide in ((h.grad, wide_h.grad), (w.grad, wide_w.grad)):
        assert (mine.double() - wide).norm() < relative * wide.norm()


def test_given_logits_equal_dense_float64():
    h, w, targets = _problem(torch.bfloat16)
    logits = (h @ w.T).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    want = dense_scores(wide, targets)
    want.logprobs.sum().backward()
    got = token_scores(logits, targets)
    got.logprobs.sum().backward()
    torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logprobs.double(), want.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-2, atol=1e-6)


def test_triton_and_torch_kernels_agree(monkeypatch):
    h, w, targets = _problem(torch.float32)
    with torch.no_grad():
        triton_scores = linear_token_scores(h, w, targets)
        monkeypatch.setattr(tiled_scores, "kernels_for", lambda _: tiles.TORCH_KERNELS)
        torch_scores = linear_token_scores(h, w, targets)
    torch.testing.assert_close(triton_scores.entropy, torch_scores.entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(triton_scores.logprobs, torch_scores.logprobs, rtol=1e-5, atol=1e-6)


def test_memory_is_a_few_tiles():
    h, w, targets = _problem(torch.bfloat16, tokens=8192, hidden=512, vocab=151_936)
    h.requires_grad_()
    w.requires_grad_()
    linear_token_scores(h[:8], w, targets[:8]).logprobs.sum().backward()
    h.grad = w.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_token_scores(h, w, targets).logprobs.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    weight_gradients = w.numel() * (4 + 2)  # summed in float32, handed over in bfloat16
    assert extra - weight_gradients < 0.2 * h.shape[0] * w.shape[0] * 2  # a fifth of bfloat16 logits
