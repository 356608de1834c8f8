"""Transformer Engine's attention with sinks, packed, as Megatron's layers of gpt-oss call it: output, every gradient.

Its own Python chooses the kernel, for a cuDNN that has sinks of packed sequences, and hands it the sinks.
"""

import itertools

import pytest
import torch

from gtpo_megatron.config.parallel import ParallelConfig
from tests.dist_utils import run_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron and Transformer Engine warn of deprecations of their own

HEADS, GROUPS, SIZE = 4, 2, 64
BOUNDS = [0, 5, 6, 40]
SINKS = [-2.0, 0.0, 1.0, 3.0]


def tensors():
    generator = torch.Generator().manual_seed(2)
    heads = [torch.randn(BOUNDS[-1], num, SIZE, generator=generator).bfloat16() for num in (HEADS, GROUPS, GROUPS)]
    return heads, torch.randn(BOUNDS[-1], HEADS * SIZE, generator=generator).bfloat16()


def attended(rank, world_size, init_method, window):
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from gtpo_megatron.actor import megatron_init

    parallel = ParallelConfig(num_ranks=1)
    megatron_init.initialize(parallel, global_rank=0, init_method=init_method, seed=0, collective_timeout_s=60)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=SIZE,
        attention_dropout=0.0,
        softmax_type="learnable",
        window_size=(window - 1, 0) if window else None,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    attention = TEDotProductAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )
    attention.softmax_offset.data.copy_(torch.tensor(SINKS))
    heads, weights = tensors()
    heads = [one.requires_grad_() for one in heads]
    bounds, longest = torch.tensor(BOUNDS, dtype=torch.int32), max(b - a for a, b in itertools.pairwise(BOUNDS))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = attention(*heads, None, AttnMaskType.causal, packed_seq_params=packed).flatten(1)
    (output * weights).sum().backward()
    found = [output.detach(), *(one.grad for one in (*heads, attention.softmax_offset))]
    megatron_init.shut_down()
    return [one.float() for one in found]


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_equal_a_column_more(window):
    [found] = run_processes(attended, 1, window, timeout_s=150)
    heads, weights = tensors()
    exact = [one.double().requires_grad_() for one in (*heads, torch.tensor(SINKS))]
    outputs = []
    for start, end in itertools.pairwise(BOUNDS):
        query, key, value = (one[start:end].transpose(0, 1) for one in exact[:3])
        key, value = (one.repeat_interleave(HEADS // GROUPS, 0) for one in (key, value))
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - (window or BOUNDS[-1]))
        scores = (query @ key.transpose(1, 2) / SIZE**0.5).masked_fill(~seen, -torch.inf)
        scores = torch.cat([scores, exact[3][:, None, None].expand(-1, end - start, 1)], -1)
        outputs.append((scores.softmax(-1)[..., :-1] @ value).transpose(0, 1))
    wanted = torch.cat(outputs).flatten(1)
    (wanted * weights.double()).sum().backward()
    for one, expected in zip(found, [wanted, *(one.grad for one in exact)], strict=True):
        assert float((one - expected).abs().max() / expected.abs().max()) < 2.0**-6  # of numbers in bfloat16
