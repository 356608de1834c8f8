"""REINFORCE++ against loops and by hand, with both baselines and both statistics."""

import itertools

import pytest
from hypothesis import given

from gtpo_megatron.config.algorithm import REINFORCEPlusPlusConfig
from tests.reference import reinforce_plus_plus as reference
from tests.strategies import Batch, batches
from tests.unit.algorithms.rival_checks import advantages, by_hand, check_invariances

CONFIGS = [
    REINFORCEPlusPlusConfig(baseline=baseline, statistics=statistics)
    for baseline, statistics in itertools.product(("none", "group"), ("responses", "tokens"))
]
IDS = [f"{config.baseline}-{config.statistics}" for config in CONFIGS]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@given(batch=batches())
def test_credit_equals_the_loops(config: REINFORCEPlusPlusConfig, batch: Batch) -> None:
    wanted = reference.advantages(
        batch.entropies,
        batch.rewards,
        batch.groups,
        baseline=config.baseline,
        by_tokens=config.statistics == "tokens",
    )
    for row, other in zip(advantages(config, batch), wanted, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize(("rewards", "lengths"), [([0.1] * 3, [1, 2, 5]), ([1.0], [3]), ([1.0, 0.0], [2, 0])])
def test_a_constant_batch_has_no_advantage(config: REINFORCEPlusPlusConfig, rewards, lengths) -> None:
    got = by_hand(config, [[0.5] * n for n in lengths], rewards, [0] * len(rewards))
    assert got == [[0.0] * n for n in lengths]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_order_cuts_and_foreign_tokens_change_nothing(config: REINFORCEPlusPlusConfig) -> None:
    check_invariances(config)
