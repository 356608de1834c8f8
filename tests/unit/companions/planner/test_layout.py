"""Which layouts are tried."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.layout import Layout, layer_splits, layers_of_chunk, layouts
from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.parallel import LayerSplit
from gtpo_megatron.weights.model_shape import LayerKind

DENSE, SPARSE = KNOWN_MODELS["Qwen/Qwen2.5-32B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
MIXED = KNOWN_MODELS["zai-org/GLM-4.5-Air"]
WINDOWS, SINKS = KNOWN_MODELS["mistralai/Mistral-7B-v0.1"], KNOWN_MODELS["openai/gpt-oss-20b"]


DELTA = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]


def all_of(shape, num_ranks, gpus_per_node=8):
    return list(layouts(shape, num_ranks=num_ranks, gpus_per_node=gpus_per_node))


@pytest.mark.parametrize("shape", [DENSE, SPARSE, MIXED, WINDOWS, SINKS])
def test_every_layout_can_be_built(shape):
    found = all_of(shape, 64)
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 64
        assert layout.tensor <= 8
        assert shape.num_query_groups % layout.tensor == 0
        assert layout.layer_split.problem(shape.num_layers) is None
        assert layout.virtual == 1 or layout.pipeline > 1
        assert layout.sequence_parallel == (layout.tensor > 1)
        experts = 1 if shape.experts is None else shape.experts.num_experts
        assert experts % layout.expert == 0
        assert layout.expert * layout.expert_tensor * layout.expert_data * layout.pipeline == 64
        width = layout.expert_tensor if shape.experts is None else shape.experts.ffn_size
        assert width % layout.expert_tensor == 0
        assert layout.expert_tensor <= layout.tensor
        assert (layout.expert, layout.expert_tensor) == (1, 1) or shape.experts is not None
        assert shape in (DENSE, SPARSE, MIXED) or shape.num_query_groups % (layout.tensor * layout.context) == 0
        assert layout.expert_tensor == 1 or shape in (SPARSE, MIXED)


def test_none_is_left_out():
    """The dense model by a scalar count: every divisor of every axis, chunks for pipelines only."""
    count = 0
    for tensor in (1, 2, 4, 8):
        for pipeline in divisors(64 // tensor):
            chunks = len(divisors(64 // pipeline)) if pipeline > 1 else 1
            count += chunks * len(divisors(64 // (tensor * pipeline)))
    assert len([layout for layout in all_of(DENSE, 64) if layout.last_layers is None]) == count


def test_a_last_stage_with_fewer_layers():
    """Qwen2.5-7B: 28 layers, an output layer as large as two and a third of them."""
    assert layer_splits(28, 1) == (LayerSplit(),)
    whole = [split.last_rank_layers for split in layer_splits(28, 4) if split.virtual == 1]
    assert whole == [None, 4]  # of 1, 4, 7, 10, ...; half of an equal share is the least
    assert [split.last_rank_layers for split in layer_splits(28, 2) if split.virtual == 1] == [None, 13, 12]
    assert [split for split in layer_splits(28, 3) if split.virtual == 1] == [LayerSplit(3, 1, 8), LayerSplit(3, 1, 6)]
    for layers, pipeline in ((28, 4), (64, 4), (94, 8), (92, 2), (2, 2), (3, 2)):
        for split in layer_splits(layers, pipeline):
            held = [number for stage in range(split.num_stages) for number in split.layers(layers, stage)]
            assert held == list(range(layers))
            assert split.last_rank_layers is None or layers / pipeline / 2 <= split.last_rank_layers < layers / pipeline


def test_experts_are_shared_in_every_way():
    """A scalar count for one stage without chunks: ranks by which experts, and each one's matrices, are divided."""
    found = [layout for layout in all_of(SPARSE, 64) if (layout.tensor, layout.pipeline, layout.context) == (4, 1, 1)]
    shared = {(layout.expert, layout.expert_tensor) for layout in found}
    assert len(found) == len(shared)
    assert shared == {(e, t) for e in (1, 2, 4, 8, 16, 32, 64) for t in (1, 2, 4) if e * t <= 64}


def test_expert_ranks_are_a_partition_of_their_own():
    layout = Layout(num_ranks=64, tensor=4, pipeline=2, expert=8)
    assert (layout.data, layout.expert_data, layout.model_ranks) == (8, 4, 2 * 8)
    assert replace(layout, expert_tensor=4).expert_data == 1
    assert replace(layout, expert=1).model_ranks == 2 * 4


@pytest.mark.parametrize(("expert", "load"), [(1, 1.0), (2, 1.5), (8, 1.5)])
def test_the_busiest_of_the_ranks_that_share_experts(expert, load):
    layout = Layout(num_ranks=8, expert=expert)
    assert layout.busiest_load(1.5) == load
    assert layout.busiest_load(100.0) == expert  # all copies of the group


def test_chunks_are_dealt_to_the_stages_in_turns():
    """GLM-4.5: 92 layers, of which the first three are dense."""
    layout = Layout(num_ranks=8, pipeline=2, virtual=23)
    shape = KNOWN_MODELS["zai-org/GLM-4.5"]
    dense, sparse = LayerKind(), LayerKind(has_experts=True)
    assert [layers_of_chunk(shape, layout, stage, 0) for stage in (0, 1)] == [((dense, 2),), ((dense, 1), (sparse, 1))]
    others = {layers_of_chunk(shape, layout, stage, chunk) for stage in (0, 1) for chunk in range(1, 23)}
    assert others == {((sparse, 2),)}


def test_tensor_parallelism_stays_in_a_node():
    assert {layout.tensor for layout in all_of(DENSE, 64, gpus_per_node=4)} == {1, 2, 4}
    assert {layout.tensor for layout in all_of(KNOWN_MODELS["Qwen/Qwen2.5-7B"], 64)} == {1, 2, 4}  # 4 key-value heads
    assert {layout.tensor for layout in all_of(DENSE, 7)} == {1}


def test_names():
    assert str(Layout(num_ranks=64, tensor=8, pipeline=4)) == "TP8 PP4 DP2"
    assert str(Layout(num_ranks=64, tensor=2, pipeline=4, virtual=2, context=2)) == "TP2 PP4 VPP2 CP2 DP4"
    assert str(Layout(num_ranks=8, pipeline=4, last_layers=13)) == "PP4(last 13) DP2"
    assert str(Layout(num_ranks=8, expert=8)) == "EP8 DP8"
    assert str(Layout(num_ranks=16, tensor=4, expert=4, expert_tensor=2)) == "TP4 EP4 ETP2 DP4"


def test_order_of_layouts_is_stable():
    found = all_of(DENSE, 64)
    assert found == all_of(DENSE, 64)
    assert all(a.tensor <= b.tensor for a, b in pairwise(found))


def test_delta_nets_share_heads_over_both_axes():
    found = all_of(DELTA, 64)
    assert {(layout.tensor, layout.context) for layout in found} == {(1, 1), (1, 2), (2, 1)}  # two key-value heads
    few = replace(DELTA, num_query_groups=8, delta=replace(DELTA.delta, num_key_heads=4))
    assert {layout.tensor for layout in all_of(few, 64)} == {1, 2, 4}


def test_stages_have_their_own_numbers_of_both_kinds():
    layout = Layout(num_ranks=16, pipeline=16)
    delta, attention = LayerKind(has_delta_net=True, has_experts=True), LayerKind(has_experts=True)
    stages = [dict(layers_of_chunk(DELTA, layout, stage, 0)) for stage in range(16)]
    assert stages[:4] == [{delta: 3}, *[{attention: 1, delta: 2}] * 3]
    assert sum(stage.get(attention, 0) for stage in stages) == 12
    assert sum(stage.get(delta, 0) for stage in stages) == 36
