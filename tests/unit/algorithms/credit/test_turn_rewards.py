"""What a turn earned is the reward of each of its tokens; each turn has exactly one."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.credit.turn_rewards import turn_reward
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.errors import DataError, ShapeError
from tests.unit.algorithms.parts import batch_of


def test_every_token_has_the_reward_of_its_turn():
    o, x = True, False
    mask = torch.tensor([[x, o, x, o, o], [o, o, o, o, o], [x, x, x, x, x], [o, x, o, x, o]])
    given = [[0.5, -1.0], [2.0], [], [1.0, 0.0, 3.0]]  # of a response without tokens, whatever there is
    batch = batch_of(mask, [], turn_rewards=given)
    assert turn_reward(batch).tolist() == [0.5, -1.0, -1.0, *[2.0] * 5, 1.0, 0.0, 3.0]
    nothing = batch_of(mask[2:3], [], turn_rewards=[[]])
    assert turn_reward(nothing).tolist() == []


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (None, ShapeError, "turn_rewards: got None, needed for turn_reward_coef=0.5"),
        ([[1.0]], ShapeError, "turn_rewards: of 1 responses, expected 3"),
        ([[1.0], [1.0], [1.0]], DataError, r"turn_rewards\[1\] has 1 rewards for 2 turns"),
        ([[1.0], [1.0, 2.0, 3.0], [1.0]], DataError, r"turn_rewards\[1\] has 3 rewards for 2 turns"),
        ([[1.0], [1.0, float("nan")], [1.0]], DataError, r"turn_rewards\[1\]\[1\] = nan: must be finite"),
        ([[1.0], [1e31, 0.0], [1.0]], DataError, r"turn_rewards\[1\]\[0\] = 1e\+31: must be finite, at most 1e\+30"),
    ],
)
def test_every_turn_has_a_reward(given, kind, said) -> None:
    """The last response has no token: what its turns earned, if anything did, is not looked at."""
    arguments = {
        "rewards": torch.tensor([1.0, 0.0, 1.0]),
        "token_entropy": torch.ones(3, 3),
        "response_mask": torch.tensor([[True, True, False], [True, False, True], [False] * 3]),
        "group_ids": torch.zeros(3, dtype=torch.int64),
    }
    config = GTPOConfig(turn_reward_coef=0.5)
    with pytest.raises(kind, match=said):
        assign_credit(config, **arguments, turn_rewards=given)
    assert assign_credit(config, **arguments, turn_rewards=[[1.0], [0.5, -0.5], []]).advantages.isfinite().all()
    plain = assign_credit(GTPOConfig(), **arguments)
    assert torch.equal(assign_credit(GTPOConfig(), **arguments, turn_rewards=given).advantages, plain.advantages)
