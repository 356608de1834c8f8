"""Frozen weights that replicas share; ``tests/distributed/test_frozen_shards.py`` has their bytes on real ranks."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.frozen_shards import frozen_bytes
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.phases import trainer_gpu
from gtpo_megatron.companions.planner.search import assess, assess_all
from gtpo_megatron.companions.planner.trainer_state import stage_parameters
from gtpo_megatron.config.adapter import AdapterConfig
from tests.unit.companions.planner.requests import request

LAYOUT = Layout(num_ranks=64, tensor=4, pipeline=4, sequence_parallel=True)
SHARED = AdapterConfig(rank=32, shard_frozen=True)


def asked(adapter=SHARED, **fields):
    return replace(request(**fields), adapter=adapter)


def whole_bytes(stage, layout=LAYOUT, **fields):
    return 2 * stage_parameters(request(**fields).shape, layout, stage, 128).num_elements


@pytest.mark.parametrize("stage", range(4))
def test_the_parts_of_all_replicas_are_the_weights(stage):
    frozen = frozen_bytes(asked(), LAYOUT, stage)
    assert whole_bytes(stage) / 4 <= frozen.kept < 1.001 * whole_bytes(stage) / 4 + 2 * 5120
    assert frozen.received == pytest.approx(3 * frozen.kept, rel=1e-4)
    layer = 2 * (request().shape.common_parameters(request().shape.layers_between(0, 1)[0][0])) / 4
    assert 2 * layer < frozen.whole < (2.1 if stage in (1, 2) else 3) * layer
    assert frozen.pushed > frozen.whole / 2


def test_experts_are_shared_by_those_that_have_the_same_ones():
    name = "Qwen/Qwen3-30B-A3B"
    layouts = [Layout(num_ranks=64, expert=size) for size in (64, 8)]
    alone, shared = (frozen_bytes(asked(model=name), layout, 0) for layout in layouts)
    parameters = [stage_parameters(request(model=name).shape, layout, 0, 128) for layout in layouts]
    dense = 2 * parameters[0].num_dense_elements / 64
    assert alone.kept == pytest.approx(dense + 2 * parameters[0].num_expert_elements, rel=1e-3)
    assert shared.kept == pytest.approx(dense + 2 * parameters[1].num_expert_elements / 8, rel=1e-3)
    assert alone.received < shared.received


def test_a_plan_has_the_bytes_in_the_phases_in_which_they_are_there():
    plain, shared = (
        trainer_gpu(asked(replace(SHARED, shard_frozen=is_shared)), LAYOUT, 0).phases for is_shared in (False, True)
    )
    frozen = frozen_bytes(asked(), LAYOUT, 0)
    for phase, parts in shared.items():
        assert plain[phase]["weights"] - parts["weights"] == whole_bytes(0) - frozen.kept
        gathered = {"save": 0, "push": frozen.pushed}.get(phase, frozen.whole)
        assert parts.get("gathered weights", 0) == gathered
    alone = trainer_gpu(asked(replace(SHARED, push="adapters")), LAYOUT, 0).phases
    assert "gathered weights" not in alone["push"]


def test_gathers_take_time_and_more_over_nodes():
    def seconds(is_shared, **layout):
        time = assess(asked(replace(SHARED, shard_frozen=is_shared)), replace(LAYOUT, **layout)).time
        return time.score, time.train

    def more(**layout):
        return [one - other for one, other in zip(seconds(True, **layout), seconds(False, **layout), strict=True)]

    score, train = more()
    assert train == pytest.approx(2 * score)
    within_nodes = more(pipeline=8)  # half of the weights, by NVLink
    assert 0 < within_nodes[0] < score / 4


def test_layouts_without_replicas_are_not_offered():
    small = asked(num_gpus=8)
    fitting, misses = assess_all(small)
    assert all(one.layout.data * one.layout.context > 1 for one in [*fitting, *misses])
