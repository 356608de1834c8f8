"""Buffers are reused, grow, and keep dtypes apart."""

import torch
from gtpo_megatron.algorithms.scratch import Scratch


def test_the_same_memory_again() -> None:
    scratch = Scratch(torch.device("cpu"))
    first = scratch.take("a", (2, 3), torch.float32)
    second = scratch.take("a", (3, 1), torch.float32)
    assert first.data_ptr() == second.data_ptr()
    assert second.shape == (3, 1)
    assert second.is_contiguous()
    assert scratch.take("b", (2, 3), torch.float32).data_ptr() != first.data_ptr()
    assert scratch.take("a", (9, 9), torch.float32).shape == (9, 9)
    assert scratch.take("a", (2,), torch.int64).dtype == torch.int64


def test_copy_converts() -> None:
    scratch = Scratch(torch.device("cpu"))
    values = torch.tensor([[1.5, 2.0]])
    assert torch.equal(scratch.copy("a", values, torch.float64), values.double())
