"""Operations of a forward pass, against torch's own count of the transformers model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from gtpo_megatron.actor.flops import forward_flops
from gtpo_megatron.weights.architecture import Architecture

ARCH = Architecture(
    family="qwen2",
    num_layers=3,
    hidden_size=64,
    ffn_size=160,
    num_heads=4,
    num_query_groups=2,
    head_size=16,
    vocab_size=97,
    max_positions=128,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=False,
    qkv_bias=True,
)


def counted(length):
    """Torch counts attention without its causal half and the output layer at every position."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    return counter.get_total_flops()


@pytest.mark.parametrize(("prompt", "response"), [(1, 40), (20, 20)])
def test_one_sequence(prompt, response):
    length = prompt + response
    square = 4 * ARCH.num_layers * ARCH.num_heads * ARCH.head_size * length * length
    causal = 2 * ARCH.num_layers * ARCH.num_heads * ARCH.head_size * length * (length + 1)
    unscored = 2 * ARCH.hidden_size * ARCH.vocab_size * prompt
    assert forward_flops(ARCH, [(prompt, response)]) == counted(length) - square + causal - unscored


def test_sequences_add_up():
    sequences = [(3, 9), (1, 0), (7, 30)]
    assert forward_flops(ARCH, sequences) == sum(forward_flops(ARCH, [one]) for one in sequences)
    assert forward_flops(ARCH, []) == 0
