"""Which groups dynamic sampling keeps."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms import informative_groups
from gtpo_megatron.outcomes import solved_counts


def test_mixed_groups_are_informative() -> None:
    labels, keep = informative_groups(torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([7, 7, -3, -3, 5, 5]))
    assert labels.tolist() == [-3, 5, 7]
    assert keep.tolist() == [False, False, True]


def test_a_response_without_a_verdict_counts_on_neither_side() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    usable = torch.tensor([True, False, True, True])
    assert informative_groups(rewards, ids, is_usable=usable)[1].tolist() == [False, True]


def test_the_threshold_decides() -> None:
    rewards, ids = torch.tensor([0.4, 0.2]), torch.tensor([0, 0])
    assert informative_groups(rewards, ids)[1].tolist() == [False]
    assert informative_groups(rewards, ids, success_threshold=0.4)[1].tolist() == [True]


def test_rewards_between_right_and_wrong_are_a_signal_by_their_spread() -> None:
    rewards, ids = torch.tensor([0.2, 0.8, 0.5, 0.5, 0.0, 0.05]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert informative_groups(rewards, ids, success_threshold=1.0)[1].tolist() == [False] * 3
    assert informative_groups(rewards, ids, min_spread=1e-6)[1].tolist() == [True, False, True]
    assert informative_groups(rewards, ids, min_spread=0.1)[1].tolist() == [True, False, False]
    assert informative_groups(rewards, ids, min_spread=1e-6, mean_between=(0.1, 0.9))[1].tolist() == [
        True,
        False,
        False,
    ]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans()), max_size=20)


@given(rows=ROWS, spread=st.sampled_from([None, 1e-6, 0.5]), low=st.sampled_from([-math.inf, 0.25, 0.5]))
def test_every_rule_against_a_loop(rows, spread, low) -> None:
    labels, kept = informative_groups(
        torch.tensor([row[1] for row in rows]),
        torch.tensor([row[0] for row in rows], dtype=torch.int64),
        is_usable=torch.tensor([row[2] for row in rows], dtype=torch.bool),
        min_spread=spread,
        mean_between=(low, 0.75),
    )
    expected = []
    for label in sorted({row[0] for row in rows}):
        values = [reward for group, reward, is_usable in rows if group == label and is_usable]
        right = sum(value >= 0.5 for value in values)
        has_signal = 0 < right < len(values) if spread is None else bool(values) and max(values) - min(values) >= spread
        expected.append(has_signal and low <= sum(values) / len(values) <= 0.75)
    assert (labels.tolist(), kept.tolist()) == (sorted({row[0] for row in rows}), expected)


def test_how_often_a_group_was_solved_leaves_out_what_has_no_verdict() -> None:
    found = solved_counts(
        torch.tensor([1.0, 0.0, 1.0, 0.7, 0.0]),
        torch.tensor([4, 4, 4, -1, 9]),
        success_threshold=0.5,
        is_usable=torch.tensor([True, True, False, True, False]),
    )
    assert found == {4: (1, 2), -1: (1, 1)}
