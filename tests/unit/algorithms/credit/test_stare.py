"""STARE against loops, by hand, and where a side or the gate is empty."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import STAREConfig
from gtpo_megatron.errors import ConfigError, ShapeError
from tests.reference import stare as reference
from tests.strategies import Batch, batches
from tests.unit.algorithms.rival_checks import advantages, check_invariances, lists, old_logprobs


@pytest.mark.slow
@given(batches(), st.sampled_from(["O1", "C2"]), st.sampled_from([1, 10, 30, 100]), st.sampled_from([0.0, 0.7, 1e9]))
def test_credit_equals_the_loops(batch: Batch, variant: str, percent: int, target: float) -> None:
    config = STAREConfig(variant=variant, top_fraction=percent / 100, entropy_target=target)
    wanted = reference.advantages(
        batch.entropies,
        batch.rewards,
        batch.groups,
        lists(old_logprobs(batch), batch),
        percent=percent,
        W=1.1,
        M=0.9,
        target=target,
        variant=variant,
    )
    for row, other in zip(advantages(config, batch), wanted, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


def run(config: STAREConfig, probabilities: list[list[float]], rewards: list[float], entropy: float = 0.1):
    batch = Batch([[entropy] * len(row) for row in probabilities], rewards, [0] * len(rewards))
    logprobs = batch.matrix([[math.log(p) for p in row] for row in probabilities]).float()
    return lists(assign_credit(config, **batch.arguments(), old_logprobs=logprobs).advantages, batch)


PROBABILITIES = [[0.9, 0.5, 0.05, 0.99, 0.3, 0.8, 0.6, 0.7, 0.2, 0.95], [0.4, 0.01, 0.9]]


def test_the_number_of_surprising_tokens_is_rounded_up() -> None:
    correct, _ = run(STAREConfig(), [[*PROBABILITIES[0], 0.1], [0.5]], [1.0, 0.0])
    assert [a > 1 for a in correct] == [column in (2, 10) for column in range(11)]
    thirty = [[0.5 + 0.01 * t for t in range(30)], [0.5]]
    assert sum(a > 1 for a in run(STAREConfig(), thirty, [1.0, 0.0])[0]) == 3  # though 0.1 is a bit more than 1/10
    seventh = STAREConfig(top_fraction=0.07)  # in float64, 0.07 * 100 is above 7
    assert sum(a > 1 for a in run(seventh, [[(t + 1) / 101 for t in range(100)], [0.5]], [1.0, 0.0])[0]) == 7


def test_the_gate_is_the_mean_entropy_of_the_batch() -> None:
    for entropy, is_open in ((0.29, True), (0.31, False)):
        correct, _ = run(STAREConfig(), PROBABILITIES, [1.0, 0.0], entropy)
        assert (max(correct) > 1) is is_open
    batch = Batch([[0.0, 0.1], [0.8, 0.0]], [1.0, 0.0], [0, 0])  # mean 0.225, one token above the target
    got = assign_credit(STAREConfig(), **batch.arguments(), old_logprobs=-torch.ones(2, 2)).advantages
    assert got[0].tolist() == pytest.approx([1.1, 1.1])  # ties are all surprising


@pytest.mark.parametrize(
    ("entropies", "rewards", "wanted"),
    [
        ([[0.1, 0.2], [0.1]], [0.0, 0.0], [[0.0, 0.0], [0.0]]),  # nobody is correct: no side at all
        ([[0.1, 0.2]], [1.0], [[0.0, 0.0]]),
        ([[], [0.1]], [1.0, 0.0], [[], [0.0]]),
        ([[]], [1.0], [[]]),
    ],
)
def test_empty_sides(entropies, rewards, wanted) -> None:
    config = STAREConfig(variant="C2")
    assert advantages(config, Batch(entropies, rewards, [0] * len(rewards))) == wanted


def test_what_it_needs() -> None:
    batch = Batch([[0.1]], [1.0], [0])
    with pytest.raises(ShapeError, match="old_logprobs: got None, needed for STAREConfig"):
        assign_credit(STAREConfig(), **batch.arguments())
    for fields in ({"top_fraction": 0.0}, {"positive_weight": 0.0}, {"entropy_target": -1.0}, {"variant": "O2"}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            STAREConfig(**fields)


def test_order_cuts_and_foreign_tokens_change_nothing() -> None:
    check_invariances(STAREConfig(entropy_target=9.0))
    check_invariances(STAREConfig(entropy_target=9.0, variant="C2", top_fraction=0.4))
