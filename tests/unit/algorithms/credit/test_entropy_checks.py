"""Entropies that cannot be inverted are refused before any other rank is asked."""

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.credit.entropy_checks import check_entropies
from gtpo_megatron.algorithms.credit.shaping import LEAST_ENTROPY
from gtpo_megatron.config.algorithm import EntropyCreditSettings, GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import DataError, ShapeError
from tests.strategies import Batch
from tests.unit.algorithms.parts import batch_of

BATCH = Batch([[1.0, 3.0], [-5e-5], []], [1, 0, 0], [4, 4, 5])


def check(config: EntropyCreditSettings, entropies: list[float], *, is_correct: bool) -> None:
    check_entropies(config, batch_of([len(entropies)], entropies, rewards=[float(is_correct)]))


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


@pytest.mark.parametrize("kind", [GTPOConfig, GRPOSConfig])
def test_patterns_need_the_tokens_that_they_leave(kind: type) -> None:
    config = kind(unshaped_patterns=("<think>",))
    with pytest.raises(ShapeError, match=r"shaped_tokens: got None, needed for unshaped_patterns=\('<think>',\)"):
        assign_credit(config, **BATCH.arguments())
    kept = torch.ones(3, 2, dtype=torch.bool)
    assert assign_credit(config, **BATCH.arguments(), shaped_tokens=kept).advantages.any()
