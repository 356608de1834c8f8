"""Operations of a forward pass, against torch's own count of the transformers model."""

import dataclasses

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from gtpo_megatron.actor.model.flops import backward_flops, forward_flops
from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet
from tests.distributed.expert_models import make_expert_model

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


def make_model():
    return Qwen2ForCausalLM(
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


def counted(length):
    """Torch counts attention without its causal half and the output layer at every position."""
    model = make_model()
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


@pytest.mark.parametrize(
    "adapter", [AdapterConfig(), AdapterConfig(rank=8), AdapterConfig(rank=3, targets=("v_proj",))]
)
def test_backward(adapter):
    """Every hidden state needs a gradient; without adapters every weight does, and below them none."""
    prompt, response = 7, 20
    length, model = prompt + response, make_model()
    if adapter.is_on:
        targets = list(adapter.targets) if adapter.targets != (ALL_LINEAR,) else ALL_LINEAR
        model = peft.get_peft_model(model, peft.LoraConfig(r=adapter.rank, target_modules=targets))
    states = torch.zeros(1, length, ARCH.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=states).logits.sum().backward()
    pairs = ARCH.num_layers * ARCH.num_heads * ARCH.head_size
    not_causal = 4 * pairs * length * length - 2 * pairs * length * (length + 1)
    unscored = 2 * ARCH.hidden_size * ARCH.vocab_size * prompt
    expected = counter.get_total_flops() - 3 * not_causal - (2 if adapter.is_on else 3) * unscored
    sequences = [(prompt, response)]
    assert forward_flops(ARCH, sequences) + backward_flops(ARCH, sequences, adapter) == expected


def test_sequences_add_up():
    sequences = [(3, 9), (1, 0), (7, 30)]
    assert forward_flops(ARCH, sequences) == sum(forward_flops(ARCH, [one]) for one in sequences)
    assert forward_flops(ARCH, []) == 0


def test_a_window_leaves_pairs_out():
    windowed = dataclasses.replace(ARCH, windows=(0, 8, 8))
    per_pair = 4 * ARCH.num_heads * ARCH.head_size
    for length in (5, 8, 9, 40):
        left_out = sum(max(0, position - 8) for position in range(1, length + 1))
        whole, found = (forward_flops(arch, [(1, length - 1)]) for arch in (ARCH, windowed))
        assert whole - found == 2 * per_pair * left_out


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_mixture_of_experts_counts_what_a_token_meets(tmp_path, family):
    """Of eight experts four, the shared one and the router; torch counts the same, as its experts run one by one."""
    model = make_expert_model(tmp_path, family, num_layers=3)
    arch = read_architecture(tmp_path)
    prompt, response = 1, 19
    length = prompt + response
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    attention = arch.num_layers * (arch.query_width + arch.output_width)
    square, causal = 2 * attention * length * length, attention * length * (length + 1)
    unscored = 2 * arch.hidden_size * arch.vocab_size * prompt
    assert forward_flops(arch, [(prompt, response)]) == counter.get_total_flops() - square + causal - unscored


@pytest.mark.parametrize("length", [40, 128])
def test_delta_nets_and_gates(monkeypatch, length):
    """Torch counts all but the delta rule itself, which is left out here: three products of a token and each state."""

    def left_out(query, key, value, **_):
        return torch.zeros_like(value), None

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", left_out)
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = Qwen3NextForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.chunk_gated_delta_rule = left_out
    arch = dataclasses.replace(
        ARCH,
        family="qwen3_next",
        num_layers=4,
        head_size=32,
        qkv_bias=False,
        qk_norm=True,
        has_output_gate=True,
        delta=DeltaNet(
            num_key_heads=2,
            num_value_heads=6,
            key_size=16,
            value_size=24,
            conv_size=4,
            layers=(True, True, True, False),
        ),
        experts=Experts(
            num_experts=8,
            experts_per_token=3,
            ffn_size=40,
            layers=(True,) * 4,
            shared_ffn_size=56,
            has_shared_gate=True,
        ),
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    square, causal = 4 * 4 * 32 * length * length, 2 * 4 * 32 * length * (length + 1)
    unscored = 2 * 64 * 97
    states = 3 * 3 * 2 * 6 * 16 * 24 * length
    convolved = 3 * 2 * 4 * (2 * 32 + 144)  # torch counts the positions that the padding makes, and cuts off, too
    found = forward_flops(arch, [(1, length - 1)])
    assert found == counter.get_total_flops() - square + causal - unscored + states - 3 * convolved
