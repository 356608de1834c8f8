"""Attention over packed sequences against softmax(q k^T / sqrt(d)) v of every sequence, in float64.

With sinks, the softmax has one more column.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.reference.sink_attention import attention as attention_by_loops

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

HEADS, GROUPS, SIZE = 4, 2, 16
BOUNDS = [0, 5, 10, 11, 47, 80, 1380]  # two neighbours of one length, one token alone


def packed_sequences(bounds, prefixes=None):
    from gtpo_megatron.actor.model.core_attention import PREFIXES

    prefixes = prefixes or ((),) * (len(bounds) - 1)
    return SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), **{PREFIXES: prefixes})


def config_of(**changes):
    return SimpleNamespace(
        **{
            "kv_channels": SIZE,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "context_parallel_size": 1,
            "tensor_model_parallel_size": 1,
            "params_dtype": torch.float32,
            "softmax_type": "vanilla",
            "window_size": None,
            "window_attn_skip_freq": None,
            **changes,
        }
    )


def reference(query, key, value, window, sinks=None, bounds=BOUNDS):
    outputs = []
    for start, end in itertools.pairwise(bounds):
        q, k, v = (x[start:end].double().transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / SIZE**0.5
        scores = scores.masked_fill(
            torch.ones(scores.shape[1:], dtype=torch.bool).tril().triu(1 - window).logical_not(), -torch.inf
        )
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], -1)
        outputs.append((scores.softmax(-1)[..., : end - start] @ v).transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def inputs(attention, num_tokens, dtype, value_size):
    """Queries, keys, values and sinks if there are any; the same in float64; weights of a sum over outputs."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, value_size))
    ours = [torch.randn(num_tokens, *size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    if attention.softmax_offset is not None:
        ours.append(attention.softmax_offset)
        attention.softmax_offset.data.copy_(torch.tensor([-2.0, 0.0, 1.0, 4.0]))
    exact = [x.detach().double().requires_grad_() for x in ours]
    return ours, exact, torch.randn(num_tokens, HEADS * value_size, generator=generator).to(dtype)


def assert_equal_with_gradients(output, expected, ours, exact, weights, bound):
    (output * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    for found, wanted in [(output, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]:
        # relative to the largest: bfloat16 rounds once, at the end
        assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < bound


@pytest.mark.parametrize("window", [None, 2, 5, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_every_sequence_attends_to_itself(dtype, bound, window, has_sinks):
    """Layer 2 of three has the window; the last sequence is longer than the kernel's blocks."""
    from gtpo_megatron.actor.model.core_attention import PackedSDPA

    config = config_of(
        params_dtype=dtype,
        softmax_type="learnable" if has_sinks else "vanilla",
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=[0, 1, 0] if window else None,
    )
    assert PackedSDPA(config, 1).window == 0
    attention = PackedSDPA(config, 2)
    ours, exact, weights = inputs(attention, BOUNDS[-1], dtype, SIZE)
    output = attention(*ours[:3], packed_seq_params=packed_sequences(BOUNDS))
    assert output.dtype == dtype
    expected = reference(*exact[:3], window or BOUNDS[-1], *exact[3:])
    assert_equal_with_gradients(output, expected, ours, exact, weights, bound)


PREFIXES = ((), ((0, 5),), ((0, 5),), ((0, 3), (5, 7)), ((0, 5),), (), ((0, 5), (8, 12)))
"""Of the sequences below: two neighbours that are run together, a branch of a branch, one without a token."""
SHARED_BOUNDS = [0, 8, 12, 16, 30, 30, 37, 50]
VALUE_SIZE = 10
"""Smaller than a key's, as multi-latent attention has it."""


@pytest.mark.parametrize("window", [None, 2, 7, 22, 23])  # the longest sequence has 22 tokens
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
def test_shared_keys_are_those_of_whole_sequences(dtype, bound, window, has_sinks):
    """Outputs, and the gradients of tokens that several sequences read, against sequences that have all tokens."""
    from gtpo_megatron.actor.model.core_attention import PackedSDPA

    config = config_of(
        params_dtype=dtype,
        softmax_type="learnable" if has_sinks else "vanilla",
        window_size=(window - 1, 0) if window else None,
    )
    attention = PackedSDPA(config, 1)
    ours, exact, weights = inputs(attention, SHARED_BOUNDS[-1], dtype, VALUE_SIZE)
    output = attention(*ours[:3], packed_seq_params=packed_sequences(SHARED_BOUNDS, PREFIXES))
    outputs = []
    for stretches, (start, end) in zip(PREFIXES, itertools.pairwise(SHARED_BOUNDS), strict=True):
        places = [place for first, last in (*stretches, (start, end)) for place in range(first, last)]
        bounds = [0, len(places)]
        whole = reference(*(one[places] for one in exact[:3]), window or len(places), *exact[3:], bounds=bounds)
        outputs.append(whole[len(places) - (end - start) :])
    expected = torch.cat(outputs)
    assert_equal_with_gradients(output, expected, ours, exact, weights, bound)


def test_neighbours_are_one_block():
    from gtpo_megatron.actor.model.core_attention import Block, _blocks

    prefixes = ((), ((0, 2),), ((0, 2),), ((0, 3),), (), ())
    bounds = [0, 4, 6, 8, 10, 10, 13]
    own = [Block((0, 4), ((0, 4),)), Block((4, 10), ((4, 10),), 3), Block((10, 13), ((10, 13),))]
    apart = [*own, Block((4, 8), ((0, 2),), sees_all=True), Block((8, 10), ((0, 3),), sees_all=True)]
    assert _blocks(bounds, prefixes, 0) == _blocks(bounds, prefixes, 5) == apart  # no sequence is longer than 5
    assert _blocks(bounds, prefixes, 3) == [
        own[0],
        Block((4, 6), ((0, 2), (4, 6))),
        Block((6, 8), ((0, 2), (6, 8))),
        Block((8, 10), ((0, 3), (8, 10))),
        own[2],
    ]
    assert _blocks([0, 4, 8, 9], ((),) * 3, 0) == [Block((0, 8), ((0, 8),), 2), Block((8, 9), ((8, 9),))]


@pytest.mark.parametrize("window", [0, 5])
def test_torch_s_own_kernels(window):
    """Which a GPU without Transformer Engine takes."""
    from gtpo_megatron.actor.model.core_attention import PackedSDPA, _blocks

    attention = PackedSDPA(config_of(window_size=(window - 1, 0) if window else None), 1)
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(BOUNDS[-1], num, SIZE, generator=generator) for num in (HEADS, GROUPS, GROUPS)]
    found = attention._by_torch(*heads, _blocks(BOUNDS, ((),) * 6, window)).flatten(1)
    torch.testing.assert_close(found.double(), reference(*heads, window or BOUNDS[-1]), rtol=0, atol=1e-5)


def test_sinks_by_loops():
    """One sequence, scalar by scalar; without a sink's exponential the weights of a token would add up to 1."""
    from gtpo_megatron.actor.model.core_attention import PackedSDPA

    attention = PackedSDPA(config_of(softmax_type="learnable", window_size=(2, 0)), 1)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 3.0])
    attention.softmax_offset.data.copy_(sinks)
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(7, num, SIZE, generator=generator) for num in (HEADS, GROUPS, GROUPS)]
    found = attention(*heads, packed_seq_params=packed_sequences([0, 7]))
    wanted = attention_by_loops(*(one.tolist() for one in heads), sinks.tolist(), 3, SIZE**-0.5)
    torch.testing.assert_close(
        found.detach().double(), torch.tensor(wanted, dtype=torch.double).flatten(1), rtol=0, atol=1e-6
    )
