"""EAPO against loops and by hand."""

import pytest
from hypothesis import given

from gtpo_megatron.config.algorithm import EAPOConfig
from gtpo_megatron.errors import ConfigError
from tests.reference import eapo as reference
from tests.strategies import Batch, batches
from tests.unit.algorithms.rival_checks import advantages, by_hand, check_invariances


@given(batches())
def test_credit_equals_the_loops(batch: Batch) -> None:
    wanted = reference.advantages(batch.entropies, batch.rewards, batch.groups, alpha=0.2, phi=2.0)
    for row, other in zip(advantages(EAPOConfig(), batch), wanted, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize(
    ("entropies", "rewards", "wanted"),
    [
        ([[0.7, 0.7], [0.7]], [1.0, 0.0], [[1.0, 1.0], [-1.0]]),  # no spread of entropies: GRPO
        ([[0.0, 3.0], [1.0]], [1.0, 1.0], [[0.0, 0.0], [0.0]]),  # no spread of rewards: nothing
        ([[0.0, 3.0]], [1.0], [[0.0, 0.0]]),
        ([[], [1.0, 2.0]], [1.0, 0.0], [[], [0.0, 0.0]]),
    ],
)
def test_without_a_spread_nothing_moves(entropies, rewards, wanted) -> None:
    assert by_hand(EAPOConfig(), entropies, rewards, [0] * len(rewards)) == wanted


def test_signs_cannot_flip() -> None:
    with pytest.raises(ConfigError, match=r"coefficient=2.0: must be less than bound=2.0"):
        EAPOConfig(coefficient=2.0)


def test_order_cuts_and_foreign_tokens_change_nothing() -> None:
    check_invariances(EAPOConfig())
    check_invariances(EAPOConfig(loss_denominator="group", std_ddof=1))
