"""Length penalties against the worked examples and a loop."""

import json
from pathlib import Path

import pytest
import torch

from gtpo_megatron.algorithms.credit.length_penalty import group_relative_overlong, soft_overlong

GOLDEN = json.loads(Path(__file__).parents[3].joinpath("golden/cases.json").read_text())


@pytest.mark.parametrize(
    ("denominator", "key"), [(512, "denominator_L1_recommended"), (4096, "denominator_L2_as_printed")]
)
def test_soft_overlong(denominator: int, key: str) -> None:
    case = GOLDEN["length_penalty_seed"]
    penalty = soft_overlong(
        torch.tensor(case["lengths"]), max_tokens=4096, buffer_tokens=512, denominator_tokens=denominator
    )
    assert penalty.tolist() == case[key]


def relative(
    rewards: list[int], lengths: list[int], hard: float = 0.0, *, ramps_incorrect: bool = False
) -> list[float]:
    live = torch.tensor(lengths) > 0
    return group_relative_overlong(
        torch.tensor(lengths),
        torch.tensor(rewards, dtype=torch.bool) & live,
        live,
        torch.zeros(len(lengths), dtype=torch.int64),
        easy_threshold=0.75,
        hard_penalty=torch.full((len(lengths),), hard, dtype=torch.float64),
        ramps_incorrect=ramps_incorrect,
    ).tolist()


@pytest.mark.parametrize("case", GOLDEN["grop_appendix_D"])
def test_group_relative(case: dict) -> None:
    for minority in ("none", "incorrect"):
        wanted = case[f"R[medium_minority={minority}]"]
        got = relative(case["rewards"], case["lengths"], ramps_incorrect=minority == "incorrect")
        assert got == pytest.approx(wanted)


def test_hard_groups_take_the_hard_penalty() -> None:
    assert relative([1, 0, 0, 0], [1, 2, 3, 4], hard=-0.25) == [-0.25] * 4


def test_rows_without_tokens_are_in_no_group() -> None:
    assert relative([1, 1, 1, 0, 1, 0], [100, 200, 600, 50, 0, 0]) == pytest.approx([0, 0, -0.25 / 0.7, 0, 0, 0])
    assert relative([1], [0]) == [0]


def test_knee_and_ramp() -> None:
    # knee of [10, 10, 10, 100] = max(55, 32.5)
    assert relative([1, 1, 1, 1], [10, 10, 10, 100])[3] == pytest.approx(-0.5 * 45 / 55)
    assert relative([1] * 20, [10] * 19 + [200])[19] == pytest.approx(-0.5 * 95 / 105)
    # knee 5/3 of [1, 2, 2] among the correct; the wrong one, however long, is not penalised
    assert relative([1, 1, 1, 0], [1, 2, 2, 900]) == pytest.approx([0, -0.1, -0.1, 0])


@pytest.mark.parametrize(("threshold", "num_correct"), [(0.9, 1), (0.8, 2), (0.7, 3)])
def test_a_rate_right_at_the_threshold_is_hard(threshold: float, num_correct: int) -> None:
    """``1 - 0.9`` is less than ``1 / 10`` in floating point."""
    is_correct = torch.arange(10) < num_correct
    hard = torch.full((10,), -0.25, dtype=torch.float64)
    found = group_relative_overlong(
        torch.arange(1, 11),
        is_correct,
        torch.ones(10, dtype=torch.bool),
        torch.zeros(10, dtype=torch.int64),
        easy_threshold=threshold,
        hard_penalty=hard,
        ramps_incorrect=False,
    )
    assert torch.equal(found, hard)
