"""Estimated seconds: no promises, but no impossible ones either, and the right order."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.hardware import GPUS
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.request import request_from
from gtpo_megatron.companions.planner.search import assess
from recipes.qwen3_next_80b_a3b import gtpo_64gpu
from tests.unit.companions.planner.requests import cluster, request

LAYOUT = Layout(num_ranks=64, tensor=4, pipeline=4, sequence_parallel=True)


def seconds(changed=None, **layout):
    return assess(changed or request(), replace(LAYOUT, **layout)).time


def test_nothing_is_faster_than_the_data_sheet():
    asked = request()
    tokens = asked.batch.num_responses * (asked.batch.mean_prompt_tokens + asked.batch.mean_response_tokens)
    # the embedding is looked up, and prompts need no output layer
    parameters = asked.shape.num_parameters - asked.shape.embedding_parameters
    least = 6 * parameters * tokens / 64 / asked.cluster.gpu.bf16_flops
    time = seconds()
    assert time.train > least
    assert time.score > least / 3
    steps = asked.batch.max_response_tokens
    assert time.generate > steps * 2 * parameters / 4 / asked.cluster.gpu.hbm_bytes_per_s


def test_the_order_of_layouts():
    assert seconds(recompute="full").train > 1.2 * seconds().train
    assert seconds(pipeline=16, virtual=4).train < seconds(pipeline=16).train  # less of it
    assert seconds(tensor=8).train > seconds().train  # more to communicate, nothing less to compute
    assert seconds(pipeline=16).score > seconds(pipeline=4).score  # the bubble
    offloaded = replace(request(), offload_fraction=1.0)
    assert seconds(offloaded).train > seconds().train


def test_the_engine_s_time_does_not_depend_on_the_trainer_s_layout():
    assert seconds().generate == seconds(pipeline=8).generate
    assert seconds(request(engine_tensor=8)).generate != seconds().generate


def test_faster_gpus_take_less():
    slow = request()
    fast = replace(slow, cluster=replace(slow.cluster, gpu=GPUS["b200"]))
    assert seconds(fast).total < seconds(slow).total


def test_longer_responses_take_longer():
    short = request()
    long = replace(short, batch=replace(short.batch, mean_response_tokens=4000))
    assert seconds(long).train == pytest.approx(seconds(short).train * 4256 / 2304, rel=0.25)
    assert seconds(long).generate > seconds(short).generate


def test_of_experts_only_the_chosen_ones_cost():
    sparse, dense = request("Qwen/Qwen3-30B-A3B"), request("Qwen/Qwen3-32B")
    one = assess(sparse, Layout(num_ranks=64, tensor=2, sequence_parallel=True, expert=8)).time
    other = assess(dense, Layout(num_ranks=64, tensor=2, sequence_parallel=True)).time
    assert 3 < other.train / one.train < 15


def test_chunks_of_a_delta_net_follow_one_another():
    """Of twice as long sequences half as many: as many products, and chunks that wait for twice as many others."""
    asked = request_from(gtpo_64gpu(), cluster())
    layout = Layout(num_ranks=64, expert=8, pipeline=4, recompute="full")
    attention = replace(asked, shape=replace(asked.shape, delta=None))

    def longer(request):
        batch = replace(request.batch, mean_prompt_tokens=1024, mean_response_tokens=1024, num_responses=512)
        twice = replace(batch, mean_prompt_tokens=2048, mean_response_tokens=2048, num_responses=256)
        one, other = (assess(replace(request, batch=batch), layout).time.score for batch in (batch, twice))
        return other / one

    assert longer(asked) > 1.1 > longer(attention) > 1


def test_decoding_reads_no_keys_of_delta_nets():
    asked = request_from(gtpo_64gpu(), cluster())
    attention = replace(asked, shape=replace(asked.shape, delta=None))
    layout = Layout(num_ranks=64, expert=8, pipeline=4, recompute="full")
    assert assess(asked, layout).time.generate < assess(attention, layout).time.generate


SPARSE = Layout(num_ranks=64, expert=8)


def sparse_seconds(imbalance=1.5, **layout):
    asked = replace(request("Qwen/Qwen3-30B-A3B"), expert_imbalance=imbalance)
    return assess(asked, replace(SPARSE, **layout)).time


def test_experts_on_other_nodes_are_far_away():
    """Copies are sent over the network as soon as the ranks that share experts are on several nodes."""
    near, far = sparse_seconds().score, sparse_seconds(expert=16).score
    assert sparse_seconds(expert=1).score < near < far
    copies = 2 * 8 * 2048 * 2 * 48  # bytes of a token, there and back, in all layers
    tokens = request().batch.num_responses * (256 + 2048) / 64
    assert far - near > tokens * copies * 0.5 / GPUS["h100"].network_bytes_per_s / 2


def test_the_busiest_rank_decides():
    assert sparse_seconds(imbalance=3.0).train > 1.5 * sparse_seconds(imbalance=1.0).train
    assert sparse_seconds(imbalance=3.0, expert=1) == sparse_seconds(imbalance=1.0, expert=1)


def test_a_decode_step_reads_the_experts_that_its_tokens_choose():
    asked = request("Qwen/Qwen3-30B-A3B")
    few, many = (
        assess(replace(asked, batch=replace(asked.batch, num_responses=num)), SPARSE).time.generate
        for num in (16, 2048)
    )
    active = 2 * asked.shape.num_active_parameters / 4 / asked.cluster.gpu.hbm_bytes_per_s
    assert 4096 * active < few < many / 1.5


def test_gradients_of_experts_are_reduced_over_fewer_ranks():
    # with as many expert ranks as there are ranks every expert is one rank's, and the optimizer has nothing to share
    assert (
        sparse_seconds(expert=64).train < sparse_seconds(expert=64, expert_tensor=1, distributed_optimizer=False).train
    )


def test_stages_on_nodes_cost_less_than_layers_that_are_shared_over_nodes():
    """Both on two nodes; a stage reads its weights twice in the time of a step, and all-reduces stay on NVLink."""
    one = request(engine_tensor=8)
    stages = replace(one, engine=replace(one.engine, stages=2, nodes=2, most=0))
    # of no use for this model, whose key-value heads are eight
    shared = replace(
        one, engine=replace(one.engine, tensor=8, nodes=2, most=0), cluster=replace(one.cluster, gpus_per_node=4)
    )
    assert seconds(one).generate < seconds(stages).generate < seconds(shared).generate
