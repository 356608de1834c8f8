"""GRPO-S: the entropy of a response."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import GRPOSConfig
from gtpo_megatron.errors import DataError
from tests.strategies import Batch


def of_responses(batch: Batch, config: GRPOSConfig, kept: torch.Tensor | None = None) -> tuple[list, list]:
    credit = assign_credit(config, **batch.arguments(), shaped_tokens=kept)
    mask = batch.arguments()["response_mask"]
    for matrix in (credit.shaped_rewards, credit.advantages):
        assert torch.equal(matrix, torch.where(mask, matrix[:, :1], 0.0))  # one value a response
    return credit.shaped_rewards[:, 0].tolist(), credit.advantages[:, 0].tolist()


def test_equal_entropies_have_exactly_equal_means_whatever_the_length() -> None:
    lengths = [1, 2, 3, 7, 50, 999]
    batch = Batch([[0.1] * n for n in lengths] + [[1.0]], [1.0] * 6 + [0.0], [0] * 7)
    for mean in ("arithmetic", "geometric"):
        config = GRPOSConfig(sequence_entropy_mean=mean, advantage_pool="per_set")
        shaped, advantages = of_responses(batch, config)
        assert len(set(shaped[:6])) == 1
        assert not any(advantages)


def test_zero_entropies_without_a_floor_matter_where_they_are_inverted() -> None:
    batch = Batch([[1.0], [0.0, 0.0]], [1, 0], [0, 0])
    with pytest.raises(DataError, match="an incorrect response has only zero entropies with entropy_floor=0"):
        assign_credit(GRPOSConfig(entropy_floor=0.0), **batch.arguments())
    for config in (
        GRPOSConfig(entropy_floor=0.0, formulation="v1"),
        GRPOSConfig(),
    ):
        assert assign_credit(config, **batch.arguments()).advantages.isfinite().all()
    batch.rewards = [0.0, 1.0]
    assert assign_credit(GRPOSConfig(entropy_floor=0.0), **batch.arguments()).advantages.isfinite().all()
