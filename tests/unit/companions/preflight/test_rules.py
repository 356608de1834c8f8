"""What passes and what fails: planted slow ranks, wrong kernels, corrupt sums, slow links, drifting versions."""

import dataclasses
import math

import pytest
from packaging.requirements import Requirement

from gtpo_megatron.companions.preflight.checks import kernels, layout, machines, sizes, step, surroundings
from gtpo_megatron.companions.preflight.expectations import TIME_FACTOR
from gtpo_megatron.companions.preflight.probes.collectives import AxisResult
from tests.unit.companions.preflight.expected import on_cpus, on_gpus, paper_config

HOSTS = [f"node{rank // 8}" for rank in range(64)]


def test_the_slow_rank_is_named():
    seconds = {f"rank {rank} on node{rank // 8}": 1.00e-3 for rank in range(16)}
    seconds["rank 11 on node1"] = 1.2e-3
    found = machines.stragglers(seconds, slowest=machines.SLOWEST)
    assert found.status == "failed"
    assert found.measured.startswith("slowest: rank 11 on node1, 1.20 times the median")
    assert "every step waits for rank 11 on node1" in found.remedy
    seconds["rank 11 on node1"] = 1.05e-3
    assert machines.stragglers(seconds, slowest=machines.SLOWEST).status == "passed"


def kernel(**fields):
    return {
        "logprobs": 2e-6,
        "entropy": 3e-6,
        "gradients": 1e-7,
        "kernels": "Triton",
        "seconds": 0.01,
        "flops": 6e12,
    } | fields


@pytest.mark.parametrize("wrong", [{"logprobs": 1e-3}, {"entropy": 0.1}, {"gradients": 1e-2}, {"entropy": math.nan}])
def test_a_wrong_kernel_fails_and_its_rank_is_named(wrong):
    found = kernels.kernel_errors("float32", {"rank 0": kernel(), "rank 5": kernel(**wrong)})
    assert found.status == "failed"
    assert "rank 5" in found.measured
    assert kernels.kernel_errors("float32", {"rank 0": kernel(), "rank 5": kernel()}).status == "passed"


def test_a_kernels_rate_is_that_of_the_slowest():
    expected = on_gpus()
    found = kernels.kernel_rate({"rank 0": kernel(), "rank 5": kernel(seconds=0.1)}, expected)
    assert (found.status, found.measured) == ("failed", "60 TFLOP/s (rank 5), 6% of the bfloat16 rate")
    assert kernels.kernel_rate({"rank 0": kernel()}, expected).status == "passed"
    assert kernels.kernel_rate({"rank 0": kernel()}, on_cpus()).status == "noted"


@pytest.mark.parametrize(("dtype", "good", "bad"), [("float32", 1e-5, 2e-3), ("bfloat16", 8e-3, 0.2)])
@pytest.mark.parametrize("quantity", ["logprobs", "change", "grad_norm"])
def test_a_layer_that_computes_something_else_fails(dtype, good, bad, quantity):
    answer = {"logprobs": good, "change": good, "grad_norm": good, "layers": 1, "kernels": "Transformer Engine"}
    assert kernels.layer_errors("node0", answer, dtype=dtype).status == "passed"
    wrong = answer | {quantity: 10 * bad}
    assert kernels.layer_errors("node0", wrong, dtype=dtype).status == "failed"


def result(ranks, *, seconds=1e-3, is_right=True, num_bytes=200_000_000):
    sent = num_bytes * 2 * (len(ranks) - 1) / len(ranks)
    return AxisResult(
        axis="tp",
        collective="all-reduce",
        ranks=ranks,
        num_bytes=num_bytes,
        sent_bytes=sent,
        seconds=seconds,
        is_right=is_right,
    )


def test_a_collective_is_as_fast_as_its_slowest_rank_on_its_slowest_group():
    groups = [tuple(range(first, first + 4)) for first in (0, 4, 8)]
    quick = [result(ranks, seconds=0.5e-3) for ranks in groups for _ in ranks]
    found = layout.of_one_axis("tp", quick, HOSTS, on_gpus())
    assert found.status == "passed", found
    slow = [*quick[:-1], result(groups[2], seconds=20e-3)]
    found = layout.of_one_axis("tp", slow, HOSTS, on_gpus())
    assert found.status == "failed"
    assert "in ranks 8-11 (slowest)" in found.measured
    assert found.expected == "at least 338 GB/s over NVLink"


def test_a_group_over_nodes_is_held_against_the_network():
    ranks = (0, 16, 32, 48)
    found = layout.of_one_axis("dp", [result(ranks, seconds=7e-3)] * 4, HOSTS, on_gpus())
    assert (found.status, found.expected) == ("passed", "at least 37.5 GB/s over the network")


def test_wrong_sums_fail_everywhere_and_name_their_group():
    found = layout.of_one_axis("tp", [result((0, 1)), result((0, 1), is_right=False)], HOSTS, on_cpus())
    assert (found.status, found.measured) == ("failed", "wrong sums in ranks 0, 1")
    found = layout.of_one_axis("tp", [result((0, 1)), result((0, 1))], HOSTS, on_cpus())
    assert (found.status, found.expected) == ("noted", "no expectation: no link's rate is known (no GPU)")


def test_a_device_that_nobody_knows_has_no_rates_but_a_plan():
    expected = on_gpus(name="Accelerator X")
    assert expected.why_no_rates == "the planner does not know 'Accelerator X'; give --gpu"
    assert expected.has_gpus
    assert on_gpus(name="Accelerator X", gpu="h200").gpu is not None
    assert machines.matrix_rate(5e14, expected).status == "noted"
    assert machines.matrix_rate(5e14, on_gpus()).status == "failed"
    assert machines.matrix_rate(7e14, on_gpus()).measured == "700 TFLOP/s, 71% of the bfloat16 rate"


@pytest.mark.parametrize(
    ("clock", "status"),
    [
        ({"clocks.sm": 1900.0, "clocks.max.sm": 1980.0}, "passed"),
        ({"clocks.sm": 900.0, "clocks.max.sm": 1980.0, "clocks_throttle_reasons.active": 4.0}, "failed"),
    ],
)
def test_a_slow_clock_fails(clock, status):
    found = machines.working_clock("rank 0", clock)
    assert found.status == status
    assert ("slowed down (reasons 0x4)" in found.measured) == (status == "failed")
    assert machines.working_clock("rank 0", {}) is None


def test_versions_must_be_the_same_on_all_nodes():
    hosts = {"node0": {"torch": "2.13.0", "ray": "2.60.0"}, "node1": {"torch": "2.12.0", "ray": "2.60.0"}}
    found = machines.same_everywhere(hosts)
    assert (found.status, found.measured) == ("failed", "torch 2.13.0 on node0, 2.12.0 on node1")
    del hosts["node1"]["torch"]
    assert machines.same_everywhere(hosts).measured == "torch 2.13.0 on node0, missing on node1"


def test_versions_are_those_that_were_tested():
    pins = {"torch": Requirement("torch==2.13.0"), "vllm": Requirement("vllm==0.32.0")}
    assert machines.pinned({"torch": "2.13.0+cu130", "ray": "9"}, pins, "gpu").status == "passed"
    found = machines.pinned({"torch": "2.12.1+cu130"}, pins, "gpu")
    assert (found.status, found.measured) == ("failed", "torch 2.12.1+cu130, wanted ==2.13.0")
    assert machines.pinned({"torch": "2.13.0"}, {}, "gpu").status == "not here"


def test_host_memory_is_held_against_the_plan():
    machine = {"cores": 128, "memory": 2 << 40, "available": 1 << 40, "shared": 1 << 40}
    assert machines.host_memory("node0", machine, paper_config(), on_gpus()).status == "passed"
    assert machines.host_memory("node0", machine | {"memory": 64 << 30}, paper_config(), on_gpus()).status == "failed"
    assert machines.host_memory("node0", machine, paper_config(), on_cpus()).status == "noted"
    short = machine | {"shared": 1 << 20}
    assert machines.shared_memory("node0", short, paper_config(), has_gpus=True).status == "failed"


def test_a_push_that_is_slow_fails_and_one_on_cpus_is_only_verified():
    slow = TIME_FACTOR * on_gpus().time.push + 1
    arguments = {"num_bytes": 65 << 30, "verified_s": 9.0}
    assert step.pushed("relay", plain_s=slow, expected=on_gpus(), **arguments).status == "failed"
    assert step.pushed("relay", plain_s=0.5, expected=on_gpus(), **arguments).status == "passed"
    found = step.pushed("relay", plain_s=1000.0, expected=on_cpus(), **arguments)
    assert (found.status, found.expected) == ("passed", "equal checksums")


@pytest.mark.parametrize(
    ("transport", "placement", "has_gpus", "hosts", "can"),
    [
        ("relay", "disaggregated", True, 2, False),
        ("relay", "colocated", True, 2, True),
        ("process_group", "colocated", True, 1, False),
        ("process_group", "colocated", False, 1, True),
        ("process_group", "disaggregated", True, 4, True),
        ("shared_memory", "disaggregated", False, 1, True),
        ("shared_memory", "colocated", True, 2, False),
    ],
)
def test_which_transports_there_are(transport, placement, has_gpus, hosts, can):
    config = paper_config()
    config = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, placement=placement),
        weight_sync=dataclasses.replace(config.weight_sync, transport="process_group"),
    )
    assert (sizes.transport_obstacle(transport, config, has_gpus=has_gpus, hosts=hosts) == "") == can


def test_seconds_of_a_step_from_those_of_a_few_long_responses():
    """128 prompts a step of 6144 tokens at most: two groups of the longest are 1/64 of a step of the longest."""
    scalars = {
        "timing/actor_score_s": 1.0,
        "timing/actor_forward_backward_s": 3.0,
        "timing/actor_optimizer_s": 0.5,
        "timing/actor_prepare_s": 0.25,
    }
    config = paper_config()
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_response_tokens
    whole = sizes.times_at_size(scalars, config, groups=2, mean_tokens=longest)
    assert whole == pytest.approx({"score": 64.0, "update": 3 * 64 + 0.75})
    half = sizes.times_at_size(scalars, config, groups=2, mean_tokens=longest / 2)
    assert half == pytest.approx({"score": 32.0, "update": 3 * 32 + 0.75})
    update = dataclasses.replace(config.update, mini_batch_prompts=32, updates_per_rollout=4)
    # two groups are less than a mini-batch: each of the four updates was of both
    in_four = sizes.times_at_size(scalars, paper_config(update=update), groups=2, mean_tokens=longest)
    assert in_four["update"] == pytest.approx(3 * 16 + 0.75)


def test_the_generation_is_cut_to_the_time_there_is():
    assert step.affordable_tokens(4096, few_s=1.6, limit_s=90.0) == 900
    assert step.affordable_tokens(128, few_s=1.6, limit_s=90.0) == 128
    assert step.affordable_tokens(4096, few_s=160.0, limit_s=1.0) == step.FEW_TOKENS
    assert step.affordable_tokens(8, few_s=160.0, limit_s=1.0) == 8


def test_a_step_is_held_against_the_plan():
    planned = on_gpus().time.total
    assert sizes.predicted({"generate": planned, "update": 1.0}, planned, why="").status == "passed"
    assert sizes.predicted({"generate": planned}, None, why="no GPU").status == "noted"
    found = sizes.predicted({"generate": 2 * planned, "update": 1.0}, planned, why="")
    assert found.status == "failed"
    assert found.figures["step_s"] == pytest.approx(2 * planned + 1)


def test_a_disk_that_needs_hours_for_a_checkpoint_fails():
    assert surroundings.write_rate(5e9, 9e9, 400 << 30).status == "passed"
    found = surroundings.write_rate(1e8, 1e8, 400 << 30)
    assert (found.status, round(found.figures["checkpoint_s"])) == ("failed", 4295)


def test_a_port_that_is_down_fails():
    hosts = {"node0": {"mlx5_0/1": "ACTIVE, 400 Gb/sec"}, "node1": {"mlx5_0/1": "DOWN, 10 Gb/sec"}}
    found = surroundings.adapters(hosts)
    assert (found.status, found.measured) == ("failed", "mlx5_0/1 of node1: DOWN, 10 Gb/sec")
    assert surroundings.adapters({"node0": {}}).status == "not here"


def test_a_port_that_is_down_on_all_nodes_is_meant_to_be():
    up, down = "ACTIVE, 400 Gb/sec", "DOWN, 10 Gb/sec"
    hosts = {host: {"mlx5_0/1": up, "mlx5_1/1": down} for host in ("node0", "node1")}
    found = surroundings.adapters(hosts)
    assert (found.status, found.measured) == (
        "passed",
        "1 port(s) a node: ACTIVE, 400 Gb/sec; down on all nodes: mlx5_1/1",
    )
    hosts["node1"]["mlx5_0/1"] = down
    assert surroundings.adapters(hosts).status == "failed"
    hosts["node0"]["mlx5_0/1"] = down
    assert surroundings.adapters(hosts).status == "noted"


def test_a_node_without_the_others_ports_fails():
    found = surroundings.adapters({"node0": {"mlx5_0/1": "ACTIVE, 400 Gb/sec"}, "node1": {}})
    assert (found.status, found.measured) == ("failed", "0 port(s) a node: none; 1 port(s) a node: ACTIVE, 400 Gb/sec")
