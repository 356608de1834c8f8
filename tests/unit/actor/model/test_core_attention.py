"""Attention over packed sequences against softmax(q k^T / sqrt(d)) v of every sequence, in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

HEADS, GROUPS, SIZE = 4, 2, 16
BOUNDS = [0, 5, 10, 11, 47, 80]  # two neighbours of one length, one token alone


def reference(query, key, value):
    outputs = []
    for start, end in itertools.pairwise(BOUNDS):
        q, k, v = (x[start:end].double().transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / SIZE**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_every_sequence_attends_to_itself(dtype, bound):
    from gtpo_megatron.actor.model.core_attention import PackedSDPA

    config = SimpleNamespace(
        kv_channels=SIZE, num_attention_heads=HEADS, num_query_groups=GROUPS, context_parallel_size=1
    )
    attention = PackedSDPA(config)
    generator = torch.Generator().manual_seed(0)
    shapes = [(BOUNDS[-1], heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    ours = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in ours]
    weights = torch.randn(BOUNDS[-1], HEADS * SIZE, generator=generator).to(dtype)

    output = attention(*ours, packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor(BOUNDS)))
    assert output.dtype == dtype
    expected = reference(*exact)
    (output * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]
    for found, wanted in pairs:
        # relative to the largest: bfloat16 rounds once, at the end
        assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < bound
