import itertools
import math

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.metrics import Max, Mean, Min, Sum, check_name, deterministic, merge, to_scalars


def test_ranks_with_different_counts_merge_into_one_weighted_mean():
    ranks = [{"policy/entropy_nats": Mean(6.0, 3)}, {"policy/entropy_nats": Mean(1.0, 1)}]
    merged = merge(ranks)
    assert merged == {"policy/entropy_nats": Mean(7.0, 4)}
    assert to_scalars(merged) == {"policy/entropy_nats": 1.75}  # not the mean of 2 and 1


def test_each_type_merges_its_own_way_and_a_rank_may_lack_a_metric():
    first = {"rollout/reward_failed_count": Sum(2), "policy/ratio_max": Max(1.5), "policy/ratio_min": Min(0.7)}
    second = {"rollout/reward_failed_count": Sum(3), "policy/ratio_max": Max(1.2)}
    assert to_scalars(merge([first, second])) == {
        "policy/ratio_max": 1.5,
        "policy/ratio_min": 0.7,
        "rollout/reward_failed_count": 5.0,
    }


def test_merging_in_two_stages_equals_merging_at_once():
    ranks = [{"a/b": Mean(float(rank), rank), "a/c": Max(-float(rank))} for rank in range(5)]
    assert merge([merge(ranks[:2]), merge(ranks[2:])]) == merge(ranks)


def test_order_of_ranks_does_not_change_a_bit():
    values = [1e16, 1.0, -1e16, 0.1]
    results = {
        to_scalars(merge([{"a/b": Sum(value)} for value in order]))["a/b"] for order in itertools.permutations(values)
    }
    assert results == {1.1}  # left-to-right addition gives 0.0, 0.1, 1.0, 1.1 and 2.1


@pytest.mark.parametrize("make", [Max, Min])
@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_on_one_rank_is_never_hidden_by_another(make, order):
    assert math.isnan(to_scalars(merge([{"a/b": make(value)} for value in order]))["a/b"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sums_pass_values_on_that_are_not_finite(bad):
    total = to_scalars(merge([{"a/b": Sum(bad)}, {"a/b": Sum(1.0)}]))["a/b"]
    assert math.isnan(total) if math.isnan(bad) else total == bad
    opposite = merge([{"a/b": Sum(math.inf)}, {"a/b": Sum(-math.inf)}])  # math.fsum alone would raise
    assert math.isnan(to_scalars(opposite)["a/b"])


def test_mean_of_nothing_is_nan_not_zero():
    assert math.isnan(to_scalars(merge([{"a/b": Mean(0.0, 0)}]))["a/b"])


def test_negative_count_is_refused():
    with pytest.raises(DataError, match="count=-1"):
        Mean(1.0, -1)


def test_one_name_with_two_types_is_refused():
    with pytest.raises(DataError, match="'a/b': got Max and Sum"):
        merge([{"a/b": Sum(1.0)}, {"a/b": Max(1.0)}])


@pytest.mark.parametrize(
    "name", ["loss", "Policy/loss", "policy/", "/loss", "a/b/c", "policy/Loss", "policy/loss ", "1a/b"]
)
def test_malformed_names_are_refused_everywhere(name):
    for use in (
        lambda: check_name(name),
        lambda: merge([{name: Sum(1.0)}]),
        lambda: to_scalars({name: Sum(1.0)}),
    ):
        with pytest.raises(DataError, match="stage/quantity_unit"):
            use()


@pytest.mark.parametrize("name", ["timing/weight_sync_s", "eval/heldout_mean_at_k", "weight_sync/b", "eval/aime24_x"])
def test_good_names_pass(name):
    check_name(name)


def test_deterministic_drops_what_measures_the_machine_only():
    row = {
        "step": 3,
        "timing/step_s": 1.0,
        "memory/peak_gib": 2.0,
        "throughput/tokens_per_s": 3.0,
        "timings/x": 4,
        "a/b": 5,
    }
    assert deterministic(row) == {"step": 3, "timings/x": 4, "a/b": 5}


def test_scalars_come_sorted_and_as_floats():
    scalars = to_scalars({"b/x": Sum(2), "a/x": Max(1)})
    assert list(scalars) == ["a/x", "b/x"]
    assert all(type(value) is float for value in scalars.values())
