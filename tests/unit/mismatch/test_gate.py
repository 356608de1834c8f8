"""The gate over planted distributions of gaps."""

import json
import math
from dataclasses import replace

import pytest
import torch

from gtpo_megatron.config.algorithm.base import OffPolicyConfig
from gtpo_megatron.config.rollout import GivenLimits, LearntLimits
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.mismatch.gate import BEYOND, CEILINGS, FLOORS, NUM_SAMPLES, MismatchGate, Sample, limits_at
from gtpo_megatron.mismatch.statistics import GAP, gap_metrics
from gtpo_megatron.observability.metrics import to_scalars
from recipes import tiny_cpu

TIGHT = GivenLimits(scaled_nats=5e-6, bound_nats=5e-4, beyond_frac=0.0)


def step(scale, num=2000, seed=0, *, tail=0.0, hit=0.0, hit_nats=0.0):
    """Figures of a step: gaps like rounding's, of which a share has a heavy tail and a share is hit by a fault."""
    generator = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(num, generator=generator, dtype=torch.float64) * 8
    gap = torch.randn(num, generator=generator, dtype=torch.float64) * scale
    gap = torch.where(torch.rand(num, generator=generator) < tail, gap * 8, gap)
    gap[: int(hit * num)] += hit_nats
    return gap_metrics(sampler + gap, sampler)


def gate(limits=None, dtype="bfloat16", *, has_other_routing=False):
    return MismatchGate(limits or LearntLimits(), coarsest_dtype=dtype, has_other_routing=has_other_routing)


@pytest.mark.slow
@pytest.mark.parametrize("num", [30, 500, 20_000])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 3e-7), ("bfloat16", 0.005), ("bfloat16", 0.2)])
def test_steps_that_differ_by_chance_never_stop_a_run(dtype, scale, num):
    watched = gate(dtype=dtype)
    for index in range(40):
        result = watched.assess(step(scale, num, index, tail=0.01), is_verified=index % 10 == 0)
        assert result.broken == ()


def test_the_largest_gap_stops_nothing():
    watched = gate()
    watched.assess(step(0.1), is_verified=True)
    result = watched.assess(step(0.1, hit=0.0006, hit_nats=2.1), is_verified=False)
    assert result.broken == ()
    assert to_scalars(result.metrics)[BEYOND] > 0


@pytest.mark.parametrize(
    ("fault", "figure"),
    [
        ({"scale": 0.5}, "sync/logprob_gap_scaled"),  # everything five times as far
        ({"scale": 0.1, "hit": 0.05, "hit_nats": 2.0}, "tokens beyond"),  # five tokens of a hundred
        ({"scale": 0.1, "hit": 0.008, "hit_nats": 4.0}, "tokens beyond"),  # fewer than the 99th percentile sees
    ],
)
def test_what_a_fault_moves_stops_the_run(fault, figure):
    watched = gate()
    assert watched.assess(step(0.1, 20_000), is_verified=True).broken == ()
    assert any(figure in phrase for phrase in watched.assess(step(num=20_000, **fault), is_verified=True).broken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sampler_that_is_wrong_from_the_first_step_is_not_learnt_from(dtype):
    watched = gate(dtype=dtype)
    assert watched.assess(step(5 * CEILINGS[dtype].scaled_nats), is_verified=True).broken
    assert not watched.has_learnt


def test_limits_follow_verified_steps_only_and_never_one_that_stops():
    watched = gate()
    watched.assess(step(0.02), is_verified=True)
    before = watched.state_dict()
    watched.assess(step(0.04), is_verified=False)
    assert watched.assess(step(0.2), is_verified=True).broken
    assert watched.state_dict() == before
    for scale in (0.04, 0.08, 0.15):  # what grows slowly while bytes are verified is the policy's, up to the ceiling
        assert watched.assess(step(scale), is_verified=True).broken == ()
    assert watched.assess(step(0.2), is_verified=False).broken == ()
    for seed in range(NUM_SAMPLES):
        watched.assess(step(0.02, seed=seed), is_verified=True)
    assert watched.assess(step(0.2), is_verified=False).broken  # and what shrank again is watched closely again


def test_given_limits_are_taken_as_they_are():
    watched = gate(TIGHT, "float32")
    assert watched.assess(step(3e-7), is_verified=True).broken == ()
    one = watched.assess(step(3e-7, hit=0.0005, hit_nats=6e-4), is_verified=True)  # a single token
    assert one.broken == ("0.050% of the tokens beyond 0.0005 nats (limit 0.000%)",)
    wide = watched.assess(step(2e-5), is_verified=True).broken
    assert [phrase.split()[0] for phrase in wide] == ["sync/logprob_gap_scaled"]


def test_experts_that_are_chosen_anew_get_more_room_at_the_first_step():
    metrics = step(0.75)
    assert gate().assess(metrics, is_verified=True).broken
    assert gate(has_other_routing=True).assess(metrics, is_verified=True).broken == ()


def test_a_nan_is_the_first_that_is_named_and_no_token_is_no_reason_to_stop():
    broken = gap_metrics(torch.tensor([-1.0, float("nan")]), torch.tensor([-1.0, -1.0]))
    result = gate().assess(broken, is_verified=True)
    assert "nan" in result.broken[0]
    assert gate().assess(gap_metrics(torch.empty(0), torch.empty(0)), is_verified=True).broken == ()


def test_what_was_learnt_survives_a_checkpoint():
    first, second = gate(), gate()
    first.assess(step(0.02), is_verified=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.has_learnt
    metrics = step(0.05, seed=9)
    assert first.assess(metrics, is_verified=True) == second.assess(metrics, is_verified=True)
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("state", [{}, {"samples": 3}, {"samples": [{"num_tokens": "many"}]}])
def test_damaged_state_is_one_line(state):
    with pytest.raises(CheckpointError, match="mismatch"):
        gate().load_state_dict(state)


def sample(scaled=0.02, p99=0.1, num=1_000_000, tail=1e-4):
    return Sample(num_tokens=num, scaled_nats=scaled, p99_nats=p99, tail_frac=tail)


def learnt(*samples, num=1_000_000, factor=3.0, other=False):
    return limits_at(
        LearntLimits(factor=factor), samples, coarsest_dtype="bfloat16", has_other_routing=other, num_tokens=num
    )


def test_factor_times_the_largest_sample_with_the_allowance_of_the_fewest_tokens():
    found = learnt(sample(), sample(scaled=0.03, num=10_000), num=40_000)
    assert found.scaled_nats == pytest.approx(3 * 0.03 * (1 + 6 / 100))
    assert found.bound_nats == FLOORS["bfloat16"].bound_nats
    assert found.beyond_frac == pytest.approx((40 + 5 * math.sqrt(40) + 5) / 40_000)


def test_the_bound_and_its_share_come_from_the_tail_of_the_samples():
    found = learnt(sample(p99=0.3, tail=0.002))
    assert found.bound_nats == pytest.approx(0.9)
    assert found.beyond_frac == pytest.approx(0.006, rel=0.1)


def test_floors_and_ceilings():
    low, high = learnt(sample(1e-6, 1e-6)), learnt(sample(0.4, 2.0))
    floor, ceiling = FLOORS["bfloat16"], CEILINGS["bfloat16"]
    assert low.scaled_nats == pytest.approx(3 * floor.scaled_nats, rel=0.01)
    assert low.bound_nats == floor.bound_nats
    assert high.scaled_nats == pytest.approx(ceiling.scaled_nats, rel=0.01)
    assert high.bound_nats == ceiling.bound_nats
    first, moe = learnt(), learnt(other=True)
    assert first.scaled_nats == pytest.approx(ceiling.scaled_nats, rel=0.01)
    assert moe.scaled_nats == pytest.approx(2 * first.scaled_nats)
    assert moe.bound_nats == 2 * first.bound_nats
    assert moe.beyond_frac == first.beyond_frac


@pytest.mark.parametrize(
    ("trainer", "sampler", "coarsest"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "fp8", "fp8"),
        ("bfloat16", "fp8", "fp8"),
    ],
)
def test_a_runs_first_limits_are_those_of_its_coarsest_dtype(trainer, sampler, coarsest):
    config = tiny_cpu.gtpo()
    config = replace(
        config,
        model=replace(config.model, dtype=trainer),
        rollout=replace(config.rollout, dtype=sampler, entropy_source="actor"),
        algorithm=replace(config.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
        weight_sync=replace(config.weight_sync, mismatch=LearntLimits()),
    )
    found = MismatchGate.of_run(config, has_experts=False).assess(step(1e-7), is_verified=True)
    assert to_scalars(found.metrics)[f"{GAP}_bound"] == CEILINGS[coarsest].bound_nats
    assert FLOORS[coarsest].scaled_nats < CEILINGS[coarsest].scaled_nats
