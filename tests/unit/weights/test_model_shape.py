"""Counts of a model whose layers have attention or a delta net, by hand."""

import math
from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet, LayerKind, ModelShape

SHAPE = ModelShape(
    num_layers=5,
    hidden_size=64,
    ffn_size=160,
    num_heads=8,
    num_query_groups=4,
    head_size=24,
    vocab_size=97,
    max_positions=1024,
    qk_norm=True,
    has_output_gate=True,
    delta=DeltaNet(
        num_key_heads=4,
        num_value_heads=12,
        key_size=16,
        value_size=40,
        conv_size=3,
        layers=(True, True, False, True, True),
    ),
    experts=Experts(
        num_experts=8,
        experts_per_token=3,
        ffn_size=36,
        layers=(False, True, True, False, True),
        shared_ffn_size=56,
        has_shared_gate=True,
    ),
)
DELTA_NET, ATTENTION = LayerKind(has_delta_net=True), LayerKind()
DENSE_MLP, ROUTER_AND_SHARED, EXPERT = 3 * 64 * 160, 64 * 8 + 3 * 64 * 56 + 64, 3 * 64 * 36


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_tensors_of_a_rank(tensor):
    """Keys are 64 wide, values 480; a rank has all of the norms and of what makes decays, and its share of the rest."""
    norms = [64, 64]
    matrices = [2 * 12 * 64, (2 * 64 + 2 * 480) * 64 // tensor, *(3 * width // tensor for width in (64, 64, 480))]
    delta_net = [*norms, 12 // tensor, 12 // tensor, 40, *matrices, 480 * 64 // tensor]
    assert SHAPE.attention_tensors(DELTA_NET, tensor) == delta_net
    attention = [*norms, 24, 24, (2 * 192 + 2 * 96) * 64 // tensor, 192 * 64 // tensor]
    assert SHAPE.attention_tensors(ATTENTION, tensor) == attention
    assert SHAPE.attention_tensors(LayerKind(has_delta_net=True, has_experts=True), tensor) == delta_net


def test_sums_over_layers_of_four_kinds():
    kinds = {LayerKind(False, True): 1, LayerKind(True, False): 2, LayerKind(True, True): 2}
    assert dict(SHAPE.layers_between(0, 5)) == kinds
    assert dict(SHAPE.layers_between(2, 4)) == {LayerKind(False, True): 1, LayerKind(True, False): 1}
    assert SHAPE.num_attention_layers == 1
    mixers = 4 * sum(SHAPE.attention_tensors(DELTA_NET, 1)) + sum(SHAPE.attention_tensors(ATTENTION, 1))
    rest = 2 * DENSE_MLP + 3 * ROUTER_AND_SHARED + 2 * 97 * 64 + 64
    assert SHAPE.num_parameters == mixers + rest + 3 * 8 * EXPERT
    assert SHAPE.num_active_parameters == mixers + rest + 3 * 3 * EXPERT
    assert SHAPE.common_parameters(DELTA_NET) == sum(SHAPE.attention_tensors(DELTA_NET, 1)) + DENSE_MLP


def test_a_token_meets_no_norms_and_no_decays():
    vectors = 64 + 64 + 12 + 12 + 40
    assert SHAPE.attention_weights(DELTA_NET) == sum(SHAPE.attention_tensors(DELTA_NET, 1)) - vectors
    assert SHAPE.attention_weights(ATTENTION) == sum(SHAPE.attention_tensors(ATTENTION, 1)) - 2 * 64 - 2 * 24


@pytest.mark.parametrize("state_width", [1, 2])
def test_a_block_of_the_cache_holds_a_state(state_width):
    assert SHAPE.cached_elements(1) == 2 * 4 * 24
    assert SHAPE.cached_elements(8) == 2 * 24
    for workers, of_token in ((1, 192), (4, 48)):
        state = (12 * 16 * 40 * state_width + 2 * (64 + 64 + 480)) / workers
        block = SHAPE.cache_block(workers, 16, state_width=state_width)
        assert block == 16 * math.ceil(state / of_token / 16)
    assert SHAPE.state_blocks == 4
    assert replace(SHAPE, delta=replace(SHAPE.delta, layers=(True, False, True, False, True))).state_blocks == 2
    plain = KNOWN_MODELS["Qwen/Qwen2.5-7B"]
    assert (plain.cache_block(1, 16), plain.state_blocks, plain.num_attention_layers) == (16, 0, 28)


def test_key_heads_of_delta_nets_are_shared_evenly():
    eight = replace(SHAPE, num_query_groups=8)
    eight.check_layout(ParallelConfig(num_ranks=4, tensor_parallel_size=4, sequence_parallel=True))
    message = r"tensor_parallel_size=8 must divide the delta nets' num_key_heads=4 .* choose from \[1, 2, 4\]"
    with pytest.raises(ConfigError, match=message):
        eight.check_layout(ParallelConfig(num_ranks=8, tensor_parallel_size=8, sequence_parallel=True))
