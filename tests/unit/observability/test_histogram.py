"""Histograms against sorted lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.observability.histogram import EDGES, RESOLUTION, Histogram
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.reference import mismatch as reference

VALUES = st.lists(st.floats(1e-11, 900.0), min_size=1, max_size=60)


@given(VALUES, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_that_of_the_sorted_values_and_at_most_one_bin_too_large(values, share):
    values = torch.tensor(values, dtype=torch.float64)
    exact = reference.quantile(values.tolist(), share)
    found = Histogram.of(values).quantile(share)
    assert exact <= found <= exact * RESOLUTION * (1 + 1e-12)


@given(VALUES, VALUES)
def test_the_sum_of_two_is_the_histogram_of_both(left, right):
    both = Histogram.of(torch.tensor(left + right))
    assert Histogram.of(torch.tensor(left)) + Histogram.of(torch.tensor(right)) == both
    assert both.num_values == len(left) + len(right)


@given(VALUES, st.floats(1e-10, 800.0))
def test_values_above_a_bound_are_counted_to_within_its_bin(values, bound):
    values = torch.tensor(values, dtype=torch.float64).tolist()
    found = Histogram.of(torch.tensor(values, dtype=torch.float64)).count_above(bound)
    assert sum(value > bound * RESOLUTION for value in values) <= found <= sum(value > bound for value in values)


def test_values_that_no_bin_is_for():
    found = Histogram.of(torch.tensor([0.0, 1e-30, math.inf, math.nan, 5e3]))
    assert found.counts == ((0, 2), (len(EDGES), 3))
    assert found.quantile(0.4) == 0.0
    assert found.quantile(0.5) == math.inf
    assert found.count_above(EDGES[-1]) == 3
    assert math.isnan(Histogram().quantile(0.5))
    assert Histogram.of(torch.empty(0)) == Histogram()


def test_ranks_histograms_become_two_scalars():
    parts = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0])]
    merged = merge([{"sync/gap": Histogram.of(part)} for part in parts])
    assert to_scalars(merged) == {"sync/gap_p50": pytest.approx(2.0), "sync/gap_p99": pytest.approx(8.0)}
