"""Which groups dynamic sampling keeps."""

import torch

from gtpo_megatron.algorithms import informative_groups


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
