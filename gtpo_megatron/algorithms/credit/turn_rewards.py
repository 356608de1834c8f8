"""What the turns of a conversation earned, as rewards of their tokens."""

import math

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import LARGEST_REWARD
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.errors import DataError, ShapeError


def turn_reward(batch: CreditBatch) -> Tensor:
    """``rho[i,k]`` of the response and the turn of each token, ``[N]`` float64: not divided by the turn's length."""
    assert batch.turn_rewards is not None
    turn = batch.turns().number
    counts = torch.tensor([len(turns) for turns in batch.turn_rewards], dtype=torch.int64)
    earned = [reward for turns in batch.turn_rewards for reward in turns]
    index = batch.spread(counts.cumsum(0) - counts) + turn
    return torch.tensor(earned, dtype=torch.float64, device=index.device).index_select(0, index)


def check_turn_rewards(batch: CreditBatch, *, coef: float) -> None:
    """Checks that each turn of each response with tokens has a finite reward.

    Args:
        batch: this rank's tokens.
        coef: weight of the rewards of turns.

    Raises:
        ShapeError: there are none, or not of every response.
        DataError: a response has more or fewer rewards than turns, or one cannot be used.
    """
    lengths, given = batch.lengths.tolist(), batch.turn_rewards
    if given is None:
        raise ShapeError(f"turn_rewards: got None, needed for turn_reward_coef={coef}")
    if len(given) != len(lengths):
        raise ShapeError(f"turn_rewards: of {len(given)} responses, expected {len(lengths)}")
    turn = batch.turns().number
    num_turns = torch.zeros(len(lengths), dtype=torch.int64, device=turn.device)
    num_turns.scatter_reduce_(0, batch.row.to(torch.int64), turn + 1, "amax")
    for row, (length, count, rewards) in enumerate(zip(lengths, num_turns.tolist(), given, strict=True)):
        if length and len(rewards) != count:
            raise DataError(f"turn_rewards[{row}] has {len(rewards)} rewards for {count} turns; give one for each")
        for turn_index, reward in enumerate(rewards if length else ()):
            if not (math.isfinite(reward) and abs(reward) <= LARGEST_REWARD):
                raise DataError(
                    f"turn_rewards[{row}][{turn_index}] = {reward}: must be finite, at most {LARGEST_REWARD:g} in "
                    f"magnitude"
                )
