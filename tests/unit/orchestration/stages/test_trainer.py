"""What the trainer's stages send to every rank, and whose results they take."""

import pickle

import pytest
import torch

from gtpo_megatron.batch import RewardBatch
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.trainer import Trainer
from tests.unit.orchestration.stages.test_rollouts import make_batch


class Rank:
    """A rank that notes what it is asked for."""

    def __init__(self, told):
        self.told = told

    def credit_tokens(self, rewards):
        self.told.append(rewards)
        return {}

    def score_tokens(self, shard):
        self.told.append(shard.global_rows)
        return {}

    use_sampler_scores = score_tokens


class Ranks:
    """As over Ray: what a rank gets is a copy; its bytes are noted."""

    def __init__(self, *, num_replicas, num_tensor=1):
        self.coordinates = [
            RankCoordinates(
                global_rank=data * num_tensor + tensor,
                tensor_index=tensor,
                pipeline_index=0,
                context_index=0,
                data_index=data,
                pipeline_size=1,
            )
            for data in range(num_replicas)
            for tensor in range(num_tensor)
        ]
        self.hosts = ["here"] * len(self.coordinates)
        self.told, self.sent_bytes = [], 0

    def run_on_each(self, stage, functions):
        results = []
        for function in functions:
            sent = [cell.cell_contents for cell in function.__closure__ or ()]
            self.sent_bytes += len(pickle.dumps(sent))
            results.append(function(Rank(self.told)))
        return results


@pytest.mark.parametrize("stage", ["score_tokens", "use_sampler_scores"])
def test_every_replica_gets_rows_of_every_update(stage):
    ranks = Ranks(num_replicas=2, num_tensor=2)
    handle = RolloutHandle.of(make_batch(16))  # groups 0 to 3, of four
    getattr(Trainer(ranks), stage)(handle, updates=[(0, 1), (2, 3)])
    first, peer, second, _ = ranks.told
    assert first == peer
    assert sorted([*first, *second]) == list(range(16))
    for rows in (first, second):
        assert {row // 8 for row in rows} == {0, 1}, "rows of both updates"
    ranks.told.clear()
    getattr(Trainer(ranks), stage)(handle)
    first, _, second, _ = ranks.told
    assert [*first, *second] == list(range(16))


def test_credit_gets_rewards_without_what_the_reward_function_said():
    rewards = RewardBatch(
        rewards=torch.tensor([1.0, 0.0]),
        failed=torch.tensor([False, True]),
        num_over_budget=1,
        parts={"format": torch.tensor([0.5, 0.5])},
        info=("x" * 10_000, ""),
        turn_rewards=((0.25, 0.75), ()),
    )
    ranks = Ranks(num_replicas=2, num_tensor=2)
    Trainer(ranks).credit_tokens(rewards)
    assert len(ranks.told) == 4
    assert ranks.sent_bytes < 10_000
    for got in ranks.told:
        assert got.rewards is rewards.rewards
        assert got.failed is rewards.failed
        assert got.turn_rewards == rewards.turn_rewards
        assert (got.parts, got.info) == ({}, ())
