"""Correction factors and how far the policies are apart."""

import math

import pytest
import torch

from gtpo_megatron.algorithms.losses.off_policy import (
    correction_ratio,
    correction_statistics,
    correction_weights,
    vetoed,
)

OLD = torch.tensor([[-1.0, -1.0], [-2.0, math.nan]])
SAMPLED = torch.tensor([[-1.5, -0.8], [-2.0, math.nan]])
MASK = torch.tensor([[True, True], [True, False]])


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("token", [[math.exp(0.5), math.exp(-0.2)], [1.0, 1.0]]),
        ("sequence", [[math.exp(0.3)] * 2, [1.0, 1.0]]),
        ("geometric", [[math.exp(0.15)] * 2, [1.0, 1.0]]),
    ],
)
def test_ratio(level: str, wanted: list[list[float]]) -> None:
    torch.testing.assert_close(correction_ratio(OLD, SAMPLED, MASK, level), torch.tensor(wanted))


def test_truncated_or_masked() -> None:
    ratio = torch.tensor([0.1, 1.0, 3.0])
    assert correction_weights(ratio, masks=False, lower=0.0, upper=2.0).tolist() == pytest.approx([0.1, 1.0, 2.0])
    assert correction_weights(ratio, masks=True, lower=0.5, upper=2.0).tolist() == [0.0, 1.0, 0.0]


def test_statistics() -> None:
    ratio = correction_ratio(OLD, SAMPLED, MASK, "token")
    got = correction_statistics(ratio, OLD, SAMPLED, MASK, lower=0.9, upper=1.5)
    means = {name.removeprefix("off_policy/"): float(s.total) / float(s.count) for name, s in got.items()}
    u = [math.exp(0.5), math.exp(-0.2), 1.0]
    assert means == pytest.approx(
        {
            "ratio_mean": sum(u) / 3,
            "ratio_square_mean": sum(v * v for v in u) / 3,
            "outside_frac": 2 / 3,
            "logprob_gap_mean": 0.7 / 3,
            "kl_nats": sum(v - 1 - math.log(v) for v in u) / 3,
        },
        rel=1e-5,
    )


def test_a_response_is_vetoed_for_one_token_whatever_the_sign_and_padding_says_nothing() -> None:
    assert vetoed(OLD, SAMPLED, MASK, 0.4).tolist() == [True, False]
    assert vetoed(SAMPLED, OLD, MASK, 0.4).tolist() == [True, False]
    assert vetoed(OLD, SAMPLED, MASK, 0.6).tolist() == [False, False]
