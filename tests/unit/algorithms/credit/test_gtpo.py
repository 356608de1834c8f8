"""GTPO from its parts, on the numbers of the paper's worked case (specification, section 9)."""

import torch

from gtpo_megatron.algorithms.credit.gtpo import gtpo_credit
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.algorithms.token_batch import CreditBatch, Tokens
from gtpo_megatron.config.algorithm import GTPOConfig
from tests.unit.algorithms.parts import column, table_of, tokens_of

H = [0.5, 2.0, 1.0, 1.5, 0.5, 0.2, 1.0, 0.8, 0.8]


def batch(
    penalties: list[float] | None = None,
    compared: torch.Tensor | None = None,
    turn_rewards: list[list[float]] | None = None,
    tokens: Tokens | None = None,
) -> CreditBatch:
    lengths = [3, 2, 3, 1]
    return CreditBatch(
        tokens=tokens or tokens_of(lengths),
        entropy=column(*H),
        compared=compared,
        turn_rewards=turn_rewards,
        table=table_of([1, 1, 0, 0], [0] * 4, lengths),
        penalties=column(*(penalties or [0.0] * 4)),
        reduction=Reduction(),
    )


def close(found: torch.Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(found, column(*wanted), rtol=0, atol=2e-6)


def test_worked_case() -> None:
    credit = gtpo_credit(GTPOConfig(entropy_floor=0.0), batch())
    close(credit.shaped_rewards, [1.05, 1.16, 1.10, 1.15, 1.04, -1.16, -1.10, -1.10, -1.04])
    close(credit.advantages[5:], [-1.226164, -1.116540, -1.116540, -1.006916])
    v1 = gtpo_credit(GTPOConfig(entropy_floor=0.0, formulation="v1"), batch())
    close(v1.advantages, [0.801136, 1.001927, 0.892405, 0.983674, 0.782883, *[-1.115506] * 4])


def test_penalties_are_added_to_every_token() -> None:
    plain = gtpo_credit(GTPOConfig(), batch()).shaped_rewards
    lowered = gtpo_credit(GTPOConfig(), batch([-0.5, 0.0, -0.25, 0.0])).shaped_rewards
    close(lowered - plain, [-0.5] * 3 + [0.0] * 2 + [-0.25] * 3 + [0.0])


def test_what_a_turn_earned_is_added_to_each_of_its_tokens() -> None:
    """The first response has two turns, of one token and of two; the others one, and the last one is not first."""
    o, x = True, False
    tokens = Tokens.of(torch.tensor([[o, x, o, o], [o, o, x, x], [o, o, o, x], [x, x, x, o]]))
    earned = [[0.5, -1.0], [0.0], [0.25], [-2.0]]
    config = GTPOConfig(turn_reward_coef=2.0)
    plain = gtpo_credit(GTPOConfig(), batch(tokens=tokens))
    credit = gtpo_credit(config, batch(tokens=tokens, turn_rewards=earned))
    close(credit.shaped_rewards - plain.shaped_rewards, [1.0, -2.0, -2.0, 0, 0, 0.5, 0.5, 0.5, -4.0])
    rewards = credit.shaped_rewards
    positive = torch.cat([rewards[:5], torch.zeros(4, dtype=torch.float64)])  # R+: zeros for the tokens of O-
    close(credit.advantages[:5], ((rewards[:5] - positive.mean()) / positive.std(correction=0)).tolist())
    nothing = gtpo_credit(config, batch(tokens=tokens, turn_rewards=[[0.0, 0.0], [0.0], [0.0], [0.0]]))
    assert torch.equal(nothing.advantages, plain.advantages)


def test_a_lone_token_is_one_that_is_compared_with_itself_alone() -> None:
    weights = gtpo_credit(GTPOConfig(), batch()).weights
    assert weights is not None
    assert weights.is_lone.tolist() == [False, False, True, False, False, False, True, True, False]
    kept = torch.tensor([True] * 3 + [False] * 2 + [True] * 4)
    masked = gtpo_credit(GTPOConfig(), batch(compared=kept)).weights
    assert masked is not None
    assert masked.is_lone.tolist() == [True, True, True, False, False, False, True, True, False]
    assert masked.values[3:5].tolist() == [1.0, 1.0]  # left out: neutral, but compared with nothing
