"""Which ranks return responses for the rollout log."""

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch, TrainBatch
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.errors import StageOrderError

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


def made(*, tensor_index, context_index):
    """A rank after credit; what it holds are rows 5 and 7 of the batch, of groups 1 and 2."""
    from gtpo_megatron.actor.actor import MegatronActor

    actor = MegatronActor.__new__(MegatronActor)
    actor.coordinates = RankCoordinates(
        global_rank=0,
        tensor_index=tensor_index,
        pipeline_index=1,
        context_index=context_index,
        data_index=0,
        pipeline_size=2,
    )
    ones = torch.ones(2, 3)
    rollouts = RolloutBatch(
        prompt_ids=torch.ones(2, 1, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=torch.arange(6).reshape(2, 3),
        response_lengths=torch.tensor([3, 3]),
        loss_mask=ones.bool(),
        rollout_logprobs=ones,
        group_ids=torch.tensor([1, 2]),
        truncated=torch.tensor([False, False]),
        policy_version=0,
    )
    actor.batch = TrainBatch(
        rollouts=rollouts,
        global_rows=(5, 7),
        prompt_groups=(1, 2),
        policy_version=0,
        old_logprobs=ones,
        token_entropy=ones,
        scored_version=0,
        shaped_rewards=ones,
        advantages=torch.tensor([[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]]),
        loss_mask=ones.bool(),
    )
    actor._last_stage = "credit_tokens"
    return actor


def test_of_ranks_that_hold_the_same_responses_one_returns_them():
    part = made(tensor_index=0, context_index=0).rows_of_groups([2])
    assert (part.global_rows, part.rollouts.response_ids.tolist()) == ((7,), [[3, 4, 5]])
    assert part.advantages.tolist() == [[20.0, 21.0, 22.0]]
    assert made(tensor_index=0, context_index=0).rows_of_groups([3]).global_rows == ()
    assert made(tensor_index=1, context_index=0).rows_of_groups([2]) is None
    assert made(tensor_index=0, context_index=1).rows_of_groups([2]) is None


def test_every_rank_says_what_is_missing():
    actor = made(tensor_index=1, context_index=0)
    actor.batch = None
    with pytest.raises(StageOrderError, match="rows_of_groups needs"):
        actor.rows_of_groups([2])
