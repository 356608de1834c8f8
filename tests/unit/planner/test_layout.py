"""Which layouts are tried."""

from itertools import pairwise

import pytest

from gtpo_megatron.config.checks import divisors
from gtpo_megatron.planner.known_models import KNOWN_MODELS
from gtpo_megatron.planner.layout import Layout, layouts

DENSE, SPARSE = KNOWN_MODELS["Qwen/Qwen2.5-32B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]


def all_of(shape, num_ranks, gpus_per_node=8):
    return list(layouts(shape, num_ranks=num_ranks, gpus_per_node=gpus_per_node))


@pytest.mark.parametrize("shape", [DENSE, SPARSE])
def test_every_layout_can_be_built(shape):
    found = all_of(shape, 64)
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 64
        assert layout.tensor <= 8
        assert shape.num_query_groups % layout.tensor == 0
        assert shape.num_layers % (layout.pipeline * layout.virtual) == 0
        assert layout.virtual == 1 or layout.pipeline > 1
        assert layout.sequence_parallel == (layout.tensor > 1)
        experts = 1 if shape.experts is None else shape.experts.num_experts
        assert experts % layout.expert == 0
        assert layout.expert * layout.expert_data * layout.pipeline == 64


def test_none_is_left_out():
    """The dense model by a scalar count: every divisor of every axis, chunks for pipelines only."""
    count = 0
    for tensor in (1, 2, 4, 8):
        for pipeline in divisors(64 // tensor):
            chunks = len(divisors(64 // pipeline)) if pipeline > 1 else 1
            count += chunks * len(divisors(64 // (tensor * pipeline)))
    assert len(all_of(DENSE, 64)) == count


def test_tensor_parallelism_stays_in_a_node():
    assert {layout.tensor for layout in all_of(DENSE, 64, gpus_per_node=4)} == {1, 2, 4}
    assert {layout.tensor for layout in all_of(KNOWN_MODELS["Qwen/Qwen2.5-7B"], 64)} == {1, 2, 4}  # 4 key-value heads
    assert {layout.tensor for layout in all_of(DENSE, 7)} == {1}


def test_names():
    assert str(Layout(num_ranks=64, tensor=8, pipeline=4)) == "TP8 PP4 DP2"
    assert str(Layout(num_ranks=64, tensor=2, pipeline=4, virtual=2, context=2)) == "TP2 PP4 VPP2 CP2 DP4"
    assert str(Layout(num_ranks=8, expert=8)) == "EP8 DP8"


def test_order_of_layouts_is_stable():
    found = all_of(DENSE, 64)
    assert found == all_of(DENSE, 64)
    assert all(a.tensor <= b.tensor for a, b in pairwise(found))
