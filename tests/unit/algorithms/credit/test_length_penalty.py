"""Length penalties against the worked examples and a loop."""

import json
from pathlib import Path

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.credit.length_penalty import group_relative_overlong, length_penalties, soft_overlong
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.errors import ConfigError, ShapeError
from tests.faked_ranks import World
from tests.unit.algorithms.parts import table_of

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


CUT = [False, True, True, True, False]
"""Responses of 6, 2, 9, 0 and 3 tokens of their own; the limit is 8 tokens with everybody's."""


@pytest.mark.parametrize(
    ("applies_to", "is_cut", "wanted"),
    [
        ("all", None, [-0.5, 0.0, -1.0, 0.0, 0.0]),
        ("all", CUT, [-0.5, -1.0, -1.0, 0.0, 0.0]),
        ("correct", CUT, [-0.5, 0.0, -1.0, 0.0, 0.0]),
    ],
)
def test_a_response_that_was_cut_is_as_long_as_the_limit(applies_to, is_cut, wanted) -> None:
    ramp = SoftOverlongPenalty(max_tokens=8, buffer_tokens=4, applies_to=applies_to)
    table = table_of([1.0, 0.0, 1.0, 0.0, 0.0], [0] * 5, [6, 2, 9, 0, 3])
    cut = None if is_cut is None else torch.tensor(is_cut)
    assert length_penalties(ramp, table, cut).tolist() == wanted
    if is_cut is not None:
        hard = GroupRelativeLengthPenalty(hard_group_penalty=ramp)
        failing = table_of([0.0] * 5, [0] * 5, [6, 2, 9, 0, 3])
        assert length_penalties(hard, failing, cut).tolist() == length_penalties(ramp, failing, cut).tolist()


def test_every_rank_says_which_of_its_responses_were_cut() -> None:
    config = GTPOConfig(length_penalty=SoftOverlongPenalty(max_tokens=8, buffer_tokens=4, applies_to="all"))
    cut = torch.tensor([False, True, True, False])
    arguments = {
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "token_entropy": torch.linspace(0.5, 1.5, 12).reshape(4, 3),
        "response_mask": torch.ones(4, 3, dtype=torch.bool),
        "group_ids": torch.zeros(4, dtype=torch.int64),
    }
    plain = assign_credit(config, **arguments)
    assert torch.equal(assign_credit(config, **arguments, truncated=torch.zeros_like(cut)).advantages, plain.advantages)
    whole = assign_credit(config, **arguments, truncated=cut)
    torch.testing.assert_close(whole.shaped_rewards, plain.shaped_rewards - cut[:, None].float())

    def shard(reduction):
        rows = torch.tensor([[0, 2], [3], [1]][reduction.rank])
        mine = {name: tensor[rows] for name, tensor in arguments.items()}
        return rows, assign_credit(config, **mine, truncated=cut[rows], reduction=reduction).advantages

    for rows, advantages in World(3).run(shard):
        assert torch.equal(advantages, whole.advantages[rows])
    with pytest.raises(ShapeError, match=r"truncated: got torch.int64, expected torch.bool"):
        assign_credit(config, **arguments, truncated=cut.long())
    with pytest.raises(ShapeError, match=r"truncated: got shape \(3,\), expected \(4,\)"):
        assign_credit(config, **arguments, truncated=cut[1:])

    def one_is_silent(reduction):
        return assign_credit(config, **arguments, truncated=cut if reduction.rank else None, reduction=reduction)

    assert all(isinstance(error, ConfigError) for error in World(2).run(one_is_silent))


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
