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
BOUNDS = [0, 5, 10, 11, 47, 80, 1380]  # two neighbours of one length, one token alone


def reference(query, key, value, window):
    outputs = []
    for start, end in itertools.pairwise(BOUNDS):
        q, k, v = (x[start:end].double().transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / SIZE**0.5
        scores = scores.masked_fill(
            torch.ones(scores.shape[1:], dtype=torch.bool).tril().triu(1 - window).logical_not(), -torch.inf
        )
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize("window", [None, 2, 5, 40])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_every_sequence_attends_to_itself(dtype, bound, window):
    """Layer 2 of three has the window; the last sequence is longer than the kernel's blocks."""
    from gtpo_megatron.actor.model.core_attention import PackedSDPA

    config = SimpleNamespace(
        kv_channels=SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        context_parallel_size=1,
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=[0, 1, 0] if window else None,
    )
    assert PackedSDPA(config, 1).window == 0
    attention = PackedSDPA(config, 2)
    generator = torch.Generator().manual_seed(0)
    shapes = [(BOUNDS[-1], heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    ours = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in ours]
    weights = torch.randn(BOUNDS[-1], HEADS * SIZE, generator=generator).to(dtype)

    output = attention(*ours, packed_seq_params=SimpleNamespace(cu_seqlens_q=torch.tensor(BOUNDS)))
    assert output.dtype == dtype
    expected = reference(*exact, window or BOUNDS[-1])
    (output * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]
    for found, wanted in pairs:
        # relative to the largest: bfloat16 rounds once, at the end
        assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < bound
