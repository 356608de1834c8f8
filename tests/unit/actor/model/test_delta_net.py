"""The chunked delta rule and the convolution over packed sequences, against a loop over tokens in float64."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.reference import delta_rule as reference

pytestmark = pytest.mark.megatron


@pytest.fixture
def delta_net(megatron):
    from gtpo_megatron.actor.model import delta_net

    return delta_net


def packed(lengths, *, key_heads=2, value_heads=4, key_size=5, value_size=3, decay=1.0):
    torch.manual_seed(sum(lengths))
    count = sum(lengths)
    query, key = (torch.randn(count, key_heads, key_size, dtype=torch.float64) for _ in range(2))
    value = torch.randn(count, value_heads, value_size, dtype=torch.float64)
    log_decay = -decay * torch.rand(count, value_heads, dtype=torch.float64)
    strength = torch.rand(count, value_heads, dtype=torch.float64)
    return [one.requires_grad_() for one in (query, key, value, log_decay, strength)], bounds_of(lengths)


def bounds_of(lengths):
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([1], {}),
        ([63, 64, 65], {}),
        ([130, 1, 7, 64], {}),
        ([70, 130], {"decay": 0.01}),
        ([70, 5], {"decay": 80.0}),  # a token forgets all that was before: no number may overflow
        ([66], {"value_heads": 2}),
        ([66, 3], {"key_heads": 1, "value_heads": 3}),
    ],
)
def test_the_delta_rule(delta_net, lengths, changes):
    inputs, bounds = packed(lengths, **changes)
    found = delta_net.delta_rule(*(one.float() for one in inputs), bounds)
    parts = [[one[start:end] for one in inputs] for start, end in itertools.pairwise(bounds)]
    wanted = torch.cat([reference.delta_rule(*part) for part in parts])
    assert found.dtype == torch.float32
    worst = 1e-5 * max(1.0, changes.get("decay", 1.0) / 10)  # logarithms are summed over a chunk, in float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=worst)
    ahead = torch.randn_like(wanted)
    exact = torch.autograd.grad((wanted * ahead).sum(), inputs)
    ours = torch.autograd.grad((found * ahead.float()).sum(), inputs)
    for one, other in zip(ours, exact, strict=True):
        assert float((one - other).abs().max()) <= 2 * worst * max(1.0, float(other.abs().max()))


class _Zeros(TorchDispatchMode):
    """Counts elements that are filled with zeros."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if "zeros" in str(function) or "zero_" in str(function):
            self.count += found.numel()
        return found


def test_the_backward_fills_no_tensor_of_all_chunks_a_chunk(delta_net):
    counts = []
    for length in (512, 1024):
        inputs, bounds = packed([length])
        found = delta_net.delta_rule(*(one.float() for one in inputs), bounds)
        with _Zeros() as zeros:
            found.sum().backward()
        counts.append(zeros.count / length)
    assert counts[1] <= 1.1 * counts[0]


def test_a_sequence_sees_no_other(delta_net):
    """The outputs of one are the same bits whatever lies beside it."""
    inputs, bounds = packed([9, 70, 4])
    inputs = [one.detach().float() for one in inputs]
    alone = delta_net.delta_rule(*(one[9:79] for one in inputs), [0, 70])
    torch.testing.assert_close(delta_net.delta_rule(*inputs, bounds)[9:79], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 8], [1, 1, 1]])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_convolution(delta_net, lengths, num):
    torch.manual_seed(num)
    inputs = torch.randn(sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, num, dtype=torch.float64, requires_grad=True)
    bounds = bounds_of(lengths)
    found = delta_net.convolved(inputs, weight, bounds)
    wanted = torch.cat([reference.convolved(inputs[start:end], weight) for start, end in itertools.pairwise(bounds)])
    torch.testing.assert_close(found, wanted)
    ahead = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * ahead).sum(), (inputs, weight)),
        torch.autograd.grad((wanted * ahead).sum(), (inputs, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
