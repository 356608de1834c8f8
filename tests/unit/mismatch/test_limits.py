"""The rule of learnt limits, by hand."""

import math

import pytest

from gtpo_megatron.config.rollout import LearntLimits
from gtpo_megatron.mismatch.limits import CEILINGS, FLOORS, Sample, limits_at


def sample(mean=0.02, median=0.01, p99=0.1, kl=1e-3, num=1_000_000, tail=1e-4):
    return Sample(
        num_tokens=num, scaled_nats=mean, mean_nats=mean, median_nats=median, p99_nats=p99, kl_nats=kl, tail_frac=tail
    )


def learnt(*samples, num=1_000_000, factor=3.0, other=False):
    return limits_at(
        LearntLimits(factor=factor), samples, coarser_dtype="bfloat16", has_other_routing=other, num_tokens=num
    )


def test_factor_times_the_largest_sample_with_the_allowance_of_the_fewest_tokens():
    found = learnt(sample(), sample(mean=0.03, num=10_000), num=40_000)
    assert found.mean_nats == pytest.approx(3 * 0.03 * (1 + 6 / 100))
    assert found.p99_nats == pytest.approx(3 * 0.15 * (1 + 40 / 100))  # the floor
    assert found.kl_nats == pytest.approx(3 * 1e-3 * (1 + 20 / 100))
    assert found.bound_nats == FLOORS["bfloat16"].bound_nats
    assert found.beyond_frac == pytest.approx((40 + 5 * math.sqrt(40) + 5) / 40_000)


def test_the_bound_and_its_share_come_from_the_tail_of_the_samples():
    found = learnt(sample(p99=0.3, tail=0.002))
    assert found.bound_nats == pytest.approx(0.9)
    assert found.beyond_frac == pytest.approx(0.006, rel=0.1)


def test_floors_and_ceilings():
    low, high = learnt(sample(1e-6, 1e-6, 1e-6, 1e-12)), learnt(sample(0.4, 0.4, 2.0, 0.2))
    floor, ceiling = FLOORS["bfloat16"], CEILINGS["bfloat16"]
    assert low.median_nats == pytest.approx(3 * floor.median_nats, rel=0.01)
    assert high.median_nats == pytest.approx(ceiling.median_nats, rel=0.01)
    assert high.bound_nats == ceiling.bound_nats
    first, moe = learnt(), learnt(other=True)
    assert first.mean_nats == pytest.approx(ceiling.mean_nats, rel=0.01)
    assert moe.mean_nats == pytest.approx(2 * first.mean_nats)
    assert moe.beyond_frac == first.beyond_frac
