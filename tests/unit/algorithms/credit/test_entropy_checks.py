"""Entropies that cannot be inverted are refused before any other rank is asked."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.credit.entropy_checks import check_entropies
from gtpo_megatron.algorithms.credit.shaping import LEAST_ENTROPY
from gtpo_megatron.algorithms.token_batch import TokenInputs
from gtpo_megatron.config.algorithm import EntropyCreditSettings, GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import DataError, ShapeError
from tests.strategies import Batch
from tests.unit.algorithms.parts import column, tokens_of

BATCH = Batch([[1.0, 3.0], [-5e-5], []], [1, 0, 0], [4, 4, 5])


def check(config: EntropyCreditSettings, entropies: list[float], *, is_correct: bool) -> None:
    inputs = TokenInputs(tokens=tokens_of([len(entropies)]), entropy=column(*entropies))
    check_entropies(config, inputs, torch.tensor([is_correct]))


@pytest.mark.parametrize(
    ("config", "is_correct"),
    [
        (GTPOConfig(entropy_floor=0.0), False),  # y takes its inverse
        (GTPOConfig(entropy_floor=0.0, formulation="v2"), False),
        (GTPOConfig(entropy_floor=0.0, entropy_mean="geometric"), True),  # its logarithm
        (GTPOConfig(entropy_floor=0.0, formulation="v1", entropy_mean="geometric"), False),
        (GRPOSConfig(entropy_floor=0.0, sequence_entropy_mean="geometric"), True),
        (GTPOConfig(entropy_floor=0.0, entropy_clip=(0.0, 1.0)), False),
    ],
)
def test_zeros_need_a_floor_where_they_are_inverted(config: EntropyCreditSettings, is_correct: bool) -> None:
    for zero in (0.0, 1e-300):
        with pytest.raises(DataError, match=r"^token_entropy\[0, 1\] is 0 with entropy_floor=0.0: .*; set entropy_fl"):
            check(config, [1.0, zero], is_correct=is_correct)


@pytest.mark.parametrize(
    ("config", "is_correct"),
    [
        (GTPOConfig(entropy_floor=0.0), True),
        (GTPOConfig(entropy_floor=0.0, formulation="v1"), False),
        (GTPOConfig(entropy_floor=0.0, shaped_sides="positive"), False),
        (GTPOConfig(entropy_floor=0.0, entropy_clip=(0.1, 2.0)), False),
        (GTPOConfig(entropy_mean="geometric"), True),
        (GRPOSConfig(entropy_floor=0.0), False),  # a mean of zeros and others is inverted, see grpo_s
    ],
)
def test_zeros_do_no_harm_elsewhere(config: EntropyCreditSettings, is_correct: bool) -> None:
    check(config, [1.0, 0.0], is_correct=is_correct)


def test_what_float64_cannot_invert_is_refused() -> None:
    check(GTPOConfig(), [1 / LEAST_ENTROPY], is_correct=True)
    with pytest.raises(DataError, match=r"token_entropy\[0, 1\] is above .*set entropy_floor above 0, or entropy_clip"):
        check(GTPOConfig(), [1.0, 1e300], is_correct=True)
    check(GTPOConfig(entropy_clip=(0.0, 5.0)), [1.0, 1e300], is_correct=True)


def test_no_tokens_are_no_problem() -> None:
    check(GTPOConfig(entropy_floor=0.0), [], is_correct=False)


def test_messages_name_the_tensor_that_was_given() -> None:
    surprisal = {"weight_source": "surprisal", "entropy_floor": 0.0}
    old = torch.tensor([[-2.0, -7.0], [0.0, 0.0], [0.0, 0.0]])
    arguments = {**BATCH.arguments(), "old_logprobs": old}
    with pytest.raises(DataError, match=r"^old_logprobs\[1, 0\] is 0 with entropy_floor=0"):
        assign_credit(GTPOConfig(**surprisal), **arguments)
    with pytest.raises(DataError, match=r"^old_logprobs\[1, 0\] is 0 with entropy_floor=0"):
        assign_credit(GRPOSConfig(**surprisal, sequence_entropy_mean="geometric"), **arguments)
    with pytest.raises(DataError, match=r"^token_entropy\[1, 0\] is 0 with entropy_floor=0"):
        assign_credit(GTPOConfig(entropy_floor=0.0), **BATCH.arguments())
    arguments["old_logprobs"] = torch.tensor([[-2.0, 0.5], [0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(DataError, match=r"^old_logprobs\[0, 1\] = 0\.5: expected a finite value <= 0\.0001"):
        assign_credit(GTPOConfig(weight_source="surprisal"), **arguments)


@pytest.mark.parametrize("kind", [GTPOConfig, GRPOSConfig])
def test_what_a_configuration_needs_must_be_given(kind: type) -> None:
    with pytest.raises(ShapeError, match="old_logprobs: got None, needed for weight_source='surprisal'"):
        assign_credit(kind(weight_source="surprisal"), **BATCH.arguments())
    config = kind(unshaped_patterns=("<think>",))
    with pytest.raises(ShapeError, match=r"shaping_mask: got None, needed for unshaped_patterns=\('<think>',\)"):
        assign_credit(config, **BATCH.arguments())
    kept = torch.ones(3, 2, dtype=torch.bool)
    assert assign_credit(config, **BATCH.arguments(), shaping_mask=kept).advantages.any()


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
