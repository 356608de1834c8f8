"""The sampler's routing travels with the rows that it belongs to."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch, take_rows
from gtpo_megatron.errors import ShapeError


def make_batch(lengths, *, first=0):
    """Every routed token has a number of its own."""
    responses = torch.tensor(lengths, dtype=torch.int64)
    width = max(lengths)
    num_run = int(responses.sum()) + len(lengths)  # prompts of two tokens, less the last token of each row
    return RolloutBatch(
        prompt_ids=torch.ones(len(lengths), 2, dtype=torch.int64),
        prompt_lengths=torch.full((len(lengths),), 2),
        response_ids=torch.ones(len(lengths), width, dtype=torch.int64),
        response_lengths=responses,
        loss_mask=torch.arange(width) < responses[:, None],
        rollout_logprobs=torch.zeros(len(lengths), width),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        policy_version=0,
        routed_experts=(first + torch.arange(num_run, dtype=torch.uint8))[:, None, None].repeat(1, 3, 2),
    )


def test_rows_of_several_batches_keep_their_routing():
    one, other = make_batch([3, 1]), make_batch([2], first=100)
    taken = take_rows([one, other], [(1, 0), (0, 1), (0, 0)])
    assert taken.routed_experts[:, 0, 0].tolist() == [100, 101, 102, 4, 5, 0, 1, 2, 3]
    assert take_rows([one, other], []).routed_experts.shape == (0, 3, 2)


def test_a_batch_without_routing_has_none_and_does_not_fit_one_with_it():
    one = make_batch([3, 1])
    without = dataclasses.replace(one, routed_experts=None)
    assert without.select([0]).routed_experts is None
    with pytest.raises(ShapeError, match="routing and some do not"):
        take_rows([one, without], [(0, 0), (1, 0)])


def test_a_token_too_many_is_refused():
    one = make_batch([3, 1])
    with pytest.raises(ShapeError, match=r"expected \[6, routers"):
        dataclasses.replace(one, routed_experts=one.routed_experts[:-1])
