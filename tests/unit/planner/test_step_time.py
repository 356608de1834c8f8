"""Estimated seconds: no promises, but no impossible ones either, and the right order."""

from dataclasses import replace

import pytest

from gtpo_megatron.planner.hardware import GPUS
from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.search import judge
from tests.unit.planner.requests import request

LAYOUT = Layout(num_ranks=64, tensor=4, pipeline=4, sequence_parallel=True)


def seconds(changed=None, **layout):
    return judge(changed or request(), replace(LAYOUT, **layout)).time


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
    assert time.generate > steps * 2 * parameters / 4 / asked.cluster.gpu.hbm_bytes


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
    one = judge(sparse, Layout(num_ranks=64, tensor=2, sequence_parallel=True, expert=8)).time
    other = judge(dense, Layout(num_ranks=64, tensor=2, sequence_parallel=True)).time
    assert 3 < other.train / one.train < 15
