"""Figures of the mismatch against float64 loops over plain lists, whole and in shards."""

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.mismatch.gate import Sample
from gtpo_megatron.mismatch.statistics import GAP, KL, SCALED, exact_total, gap_metrics
from gtpo_megatron.observability.histogram import RESOLUTION
from gtpo_megatron.observability.metrics import Max, merge, to_scalars
from tests.dist_utils import run_ranks
from tests.reference import mismatch as reference


def tokens(scale, num=4000):
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(num, generator=generator) * 8
    return (sampler + torch.randn(num, generator=generator) * scale).clamp(max=0.0), sampler


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 3.0])
def test_every_figure_is_that_of_the_loops(scale):
    trainer, sampler = tokens(scale)
    found = to_scalars(gap_metrics(trainer, sampler))
    lists = trainer.double().tolist(), sampler.double().tolist()
    gaps = reference.gaps(*lists)
    assert found[f"{GAP}_mean"] == pytest.approx(reference.mean(gaps), rel=1e-12)
    assert found[f"{GAP}_max"] == max(gaps)
    assert found[SCALED] == pytest.approx(reference.scaled(*lists), rel=1e-9)
    assert found[KL] == pytest.approx(reference.kl(*lists), rel=1e-6)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact = reference.quantile(gaps, share)
        assert exact <= found[f"{GAP}_{name}"] <= exact * RESOLUTION * (1 + 1e-12)
    bound = 2 * reference.quantile(gaps, 0.9)
    above = gap_metrics(trainer, sampler)[GAP].count_above(bound) / len(gaps)
    assert reference.share_beyond(gaps, bound * RESOLUTION) <= above <= reference.share_beyond(gaps, bound)


def test_a_token_that_is_not_a_number_makes_the_mean_one_and_no_token_is_no_figure():
    trainer, sampler = tokens(1e-2, 10)
    trainer[3] = math.nan
    found = to_scalars(gap_metrics(trainer, sampler))
    assert math.isnan(found[f"{GAP}_mean"])
    assert math.isnan(found[KL])
    assert math.isnan(found[f"{GAP}_max"])
    none = gap_metrics(torch.empty(0), torch.empty(0))
    assert none[f"{GAP}_max"] == Max(0.0)
    assert Sample.of(none).num_tokens == 0


def test_the_total_is_exact_in_any_order_and_split():
    values = torch.rand(30_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-7
    values[5] = 2.0**29
    whole = exact_total(values)
    assert isinstance(whole, Fraction)
    assert exact_total(values.flip(0)) == whole
    assert exact_total(values[:7]) + exact_total(values[7:]) == whole
    assert abs(float(whole) - math.fsum(values.tolist())) <= len(values) * 2.0**-60 + 1e-7
    assert exact_total(torch.tensor([math.inf], dtype=torch.float64)) == math.inf


def shard(rank, size, scale):
    """What the driver would merge, by a rank that has the tokens ``rank, rank + size, ...``."""
    trainer, sampler = tokens(scale)
    found = [None] * size
    dist.all_gather_object(found, gap_metrics(trainer[rank::size], sampler[rank::size]))
    return merge(found)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_one_process_bit_for_bit(size):
    whole = merge([gap_metrics(*tokens(0.2))])
    for found in run_ranks(shard, size, 0.2):
        assert found == whole
        assert to_scalars(found) == to_scalars(whole)
