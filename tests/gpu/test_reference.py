"""A reference policy in page-locked host memory changes places with weights on a GPU, bit for bit."""

import pytest
import torch

from gtpo_megatron.actor import host_pieces
from gtpo_megatron.actor.reference import ReferencePolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_policies_exchange_bytes_between_gpu_and_host(monkeypatch):
    monkeypatch.setattr(host_pieces, "PIECE_BYTES", 1 << 20)
    live = {
        "a": torch.randn(700_000, device="cuda"),  # pieces with a rest
        "b": torch.randn(3, 5, device="cuda", dtype=torch.bfloat16),
    }
    policy = ReferencePolicy(lambda: live, reset_every_steps=0, files={})
    first = {name: tensor.clone() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.mul_(2)
    moved = {name: tensor.clone() for name, tensor in live.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with policy.in_place():
        assert all(torch.equal(live[name], first[name]) for name in live)
    assert all(torch.equal(live[name], moved[name]) for name in live)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20  # a piece, and what the comparison makes
    values = policy.values()
    assert all(torch.equal(values[name], first[name].cpu()) for name in live)
    assert not any(value.is_pinned() for value in values.values())
