"""The reducer gives every rank its rows of the one-process result, bit for bit, and never leaves a rank waiting."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit, prepare_update
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    DAPOConfig,
    EAPOConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
    KLCovConfig,
    REINFORCEPlusPlusConfig,
)
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.distributed import advantage_reducer
from gtpo_megatron.distributed.advantage_reducer import ProcessGroupReduction, reduction_over
from gtpo_megatron.errors import ConfigError, DataError, GTPOError
from tests import credit_fuzz
from tests.credit_cases import ALGORITHMS, Case, draw_batch
from tests.dist_utils import run_ranks
from tests.strategies import Batch, moved, random_batch, with_holes

pytestmark = pytest.mark.distributed

PENALTY = GroupRelativeLengthPenalty(hard_group_penalty=SoftOverlongPenalty(max_tokens=12, buffer_tokens=6))
CONFIGS: list[AlgorithmConfig] = [
    GTPOConfig(),
    GTPOConfig(formulation="v1", advantage_scope="group"),
    GTPOConfig(formulation="v2", alpha1=0.9, kappa=4.0, length_penalty=PENALTY),
    GTPOConfig(formulation="v1_clipped", alpha1=0.9, kappa=4.0),
    GTPOConfig(entropy_axis="matrix", advantage_pool="per_set"),
    GTPOConfig(entropy_axis="response", advantage_pool="combined", std_ddof=1),
    GTPOConfig(entropy_mean="geometric", one_sided_groups="keep"),
    GTPOConfig(entropy_scope="batch", entropy_clip=(0.1, 2.0)),
    GTPOConfig(entropy_scope="batch", entropy_mean="geometric", entropy_axis="matrix", advantage_scope="group"),
    ControlConfig(weight_source="shuffled"),
    ControlConfig(weight_source="surprisal", shaped_sides="negative"),
    GRPOSConfig(),
    GRPOSConfig(formulation="v2", sequence_entropy_mean="geometric", entropy_mean="geometric"),
    GRPOSConfig(formulation="v1_clipped", beta1=0.9, kappa=4.0),
    GRPOSConfig(entropy_scope="batch", advantage_scope="batch"),
    GRPOConfig(loss_denominator="group"),
    DAPOConfig(length_penalty=SoftOverlongPenalty(max_tokens=12, buffer_tokens=6, applies_to="all")),
    REINFORCEPlusPlusConfig(baseline="group", statistics="tokens"),
    EAPOConfig(std_ddof=1),
    *(config for name, config in ALGORITHMS.items() if name not in ("gtpo", "grpo_s")),
]


class Inputs:
    """A batch with log-probs and a formatting mask, left-aligned."""

    def __init__(self, seed: int, *, is_wide: bool = False) -> None:
        batch: Batch = random_batch(seed, num_groups=5, group_size=7, max_tokens=13)
        self.arguments = batch.arguments(padding=float("nan"))
        generator = torch.Generator().manual_seed(seed)
        shape = self.arguments["token_entropy"].shape
        if is_wide:  # entropies of 1e-25 to 1e20 beside zeros
            self.arguments["token_entropy"] *= 10 ** (45 * torch.rand(shape, generator=generator) - 25)
        self.old = -3 * torch.rand(shape, generator=generator)
        self.sampled = (self.old + 0.1 * torch.randn(shape, generator=generator)).clamp(max=0)
        self.kept = torch.rand(shape, generator=generator) < 0.8


def outcome(
    config: AlgorithmConfig, inputs: Inputs, rows: Tensor, dp_group: object, mask: Tensor | None = None
) -> list[object]:
    """Everything that must not depend on the sharding; matrices are left-aligned, whatever ``mask`` says.

    Args:
        config: of the algorithm.
        inputs: the batch.
        rows: those of this rank.
        dp_group: None for one process.
        mask: where this rank's matrices have the policy's own tokens; NaN stands everywhere else.
    """
    own = inputs.arguments["response_mask"][rows]
    mask = own if mask is None else mask
    matrices = {
        "token_entropy": moved(inputs.arguments["token_entropy"][rows], own, mask),
        "old_logprobs": moved(inputs.old[rows], own, mask),
        "response_mask": mask,
    }
    rest = {**matrices, "group_ids": inputs.arguments["group_ids"][rows]}
    arguments = {**rest, "rewards": inputs.arguments["rewards"][rows]}
    arguments["teacher_logprobs"] = 0.5 * arguments["old_logprobs"]
    credit = advantage_reducer.assign_credit(config, **arguments, dp_group=dp_group)
    sampled = moved(inputs.sampled[rows], own, mask)
    reduction = reduction_over(dp_group)
    update = prepare_update(config, advantages=credit.advantages, rollout_logprobs=sampled, **rest, reduction=reduction)
    results = [credit.shaped_rewards, credit.advantages, update.row_weights, update.token_selection]
    if isinstance(config, GTPOConfig | GRPOSConfig):
        kept = moved(inputs.kept[rows], own, mask, False)
        masked = advantage_reducer.assign_credit(config, **arguments, shaped_tokens=kept, dp_group=dp_group)
        results += [masked.shaped_rewards, masked.advantages]
    aligned = [
        moved(result, mask, own, 0.0) if isinstance(result, Tensor) and result.ndim == 2 else result
        for result in results
    ]
    return [*aligned, credit.metrics]


def deal_and_run(
    rank: int, world_size: int, inputs: Inputs, owners: list[Tensor], chosen: list[AlgorithmConfig], has_holes: bool
) -> list[list[list[object]]]:
    """One result a sharding and config; the ranks pad to different widths."""
    group = dist.group.WORLD
    results = []
    for owner in owners:
        rows = torch.nonzero(owner == rank).flatten()
        own = inputs.arguments["response_mask"][rows]
        mask = own[:, : int(own.sum(1).max()) if len(rows) else 0]
        if has_holes:
            mask = with_holes(mask, 2 * rank + 1, torch.Generator().manual_seed(rank))
        results.append([outcome(config, inputs, rows, group, mask) for config in chosen])
    return results


def assert_same_rows(actual: list[object], wanted: list[object], rows: Tensor) -> None:
    for one, other in zip(actual[:-1], wanted[:-1], strict=True):
        if isinstance(other, Tensor):
            assert isinstance(one, Tensor)
            assert torch.equal(one, other[rows])
        else:
            assert one is None
    assert isinstance(actual[-1], dict)
    assert actual[-1] == wanted[-1]


def check_dealings(
    inputs: Inputs, world_size: int, owners: list[Tensor], configs: list[AlgorithmConfig], *, has_holes: bool = False
) -> None:
    everyone = torch.arange(len(inputs.old))
    results = run_ranks(deal_and_run, world_size, inputs, owners, configs, has_holes)
    wanted = [outcome(config, inputs, everyone, None) for config in configs]
    for rank in range(world_size):
        for dealing, owner in enumerate(owners):
            rows = torch.nonzero(owner == rank).flatten()
            for config in range(len(configs)):
                assert_same_rows(results[rank][dealing][config], wanted[config], rows)


NUM_ROWS = len(Inputs(0).old)


def random_deal(world_size: int, num_holders: int, generator: torch.Generator) -> Tensor:
    """A rank for every row, of ``num_holders`` ranks drawn at random; the others stay empty."""
    holders = torch.randperm(world_size, generator=generator)[:num_holders]
    return holders[torch.randint(0, num_holders, (NUM_ROWS,), generator=generator)]


@pytest.mark.parametrize(
    ("world_size", "has_holes"),
    [
        (3, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, True), (2, True), (4, False))),
    ],
)
def test_every_algorithm_gives_the_bits_of_one_process(world_size: int, has_holes: bool) -> None:
    generator = torch.Generator().manual_seed(world_size)
    owners = [random_deal(world_size, num_holders, generator) for num_holders in {world_size, max(1, world_size - 1)}]
    check_dealings(Inputs(world_size), world_size, owners, CONFIGS, has_holes=has_holes)


WIDE = [
    GTPOConfig(entropy_floor=1e-25),
    GTPOConfig(entropy_floor=1e-12, entropy_axis="matrix", entropy_scope="batch"),
    GTPOConfig(entropy_floor=1e-30, entropy_scope="batch", advantage_pool="per_set"),
    GTPOConfig(entropy_floor=1e-30, entropy_axis="response"),
    GTPOConfig(entropy_floor=0.0, formulation="v1"),
    GTPOConfig(entropy_floor=0.0, entropy_clip=(1e-14, 1e14), entropy_mean="geometric", entropy_axis="matrix"),
    GRPOSConfig(entropy_floor=1e-30, sequence_entropy_mean="geometric"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4))])
def test_any_range_of_entropies_gives_the_bits_of_one_process(world_size: int) -> None:
    rows = torch.arange(NUM_ROWS)
    check_dealings(
        Inputs(world_size, is_wide=True), world_size, [rows % world_size, rows * world_size // NUM_ROWS], WIDE
    )


@pytest.mark.slow
def test_every_dealing_gives_the_bits_of_one_process() -> None:
    world_size = 4
    groups = Inputs(world_size).arguments["group_ids"]
    owners = [
        torch.arange(NUM_ROWS) % world_size,  # every group split
        torch.unique(groups, return_inverse=True)[1] % world_size,  # none
        torch.zeros(NUM_ROWS, dtype=torch.int64),  # all other ranks empty
        torch.full((NUM_ROWS,), world_size - 1),
        torch.arange(NUM_ROWS) % 2 + 1,  # the outer ranks empty
    ]
    check_dealings(Inputs(world_size), world_size, owners, [CONFIGS[0], CONFIGS[3], CONFIGS[6], GRPOSConfig()])


TALKS = [
    GTPOConfig(turn_reward_coef=0.5),
    GTPOConfig(turn_reward_coef=2.0, entropy_axis="turn", one_sided_groups="keep"),
    GTPOConfig(turn_reward_coef=0.1, formulation="v1", advantage_scope="group"),
]


def talks(seed: int) -> list[Case]:
    """Batches of conversations of several turns."""
    draw = random.Random(seed)
    return [Case(config=config, **draw_batch(draw)) for config in TALKS for _ in range(16)]


def run_talks(rank: int, world_size: int, seed: int) -> list[credit_fuzz.Outcome]:
    """This rank's part of each batch, with other foreign tokens than the next rank's."""
    draw, found = random.Random(rank), []
    for case in talks(seed):
        mine = case.rows([row for row in range(len(case.rewards)) if row % world_size == rank])
        reduction = ProcessGroupReduction(dist.group.WORLD)
        found.append(credit_fuzz.run(mine, mine.arguments(draw, most_holes=rank), reduction))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rewards_of_turns_give_the_bits_of_one_process(world_size: int) -> None:
    results = run_ranks(run_talks, world_size, 7)
    num_taken = 0
    for index, case in enumerate(talks(7)):
        whole = credit_fuzz.run(case, case.arguments(random.Random(0), most_holes=0), Reduction())
        assert not list(credit_fuzz.unlike_the_loops(case, whole) if not whole.refusal else ())
        num_taken += not whole.refusal and any(map(any, whole.advantages))
        for rank in range(world_size):
            rows = list(range(len(case.rewards)))[rank::world_size]
            assert list(credit_fuzz.differences(whole, results[rank][index], rows)) == []
    assert num_taken >= 8


def run_in_subgroup(rank: int, world_size: int, seed: int) -> object:
    """Ranks 1 and 3 hold the batch; 0 and 2 take no part."""
    members = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    inputs = Inputs(seed)
    rows = torch.arange(len(inputs.old))[(rank == 3) :: 2]
    return rows, outcome(GTPOConfig(), inputs, rows, members)


@pytest.mark.slow
def test_any_subgroup_will_do() -> None:
    inputs = Inputs(9)
    wanted = outcome(GTPOConfig(), inputs, torch.arange(len(inputs.old)), None)
    for result in run_ranks(run_in_subgroup, 4, 9):
        if result is not None:
            assert_same_rows(result[1], wanted, result[0])


def spoilt_advantages(advantages: Tensor, row: int) -> Tensor:
    return advantages.index_fill(0, torch.tensor([row]), float("nan"))


def run_with_bad_values(rank: int, world_size: int) -> list[str]:
    """Rank 1 is given something else wrong every time; then all is well again."""
    inputs = Inputs(1)
    rows = torch.arange(len(inputs.old))[rank::world_size]
    good = {name: value[rows] for name, value in inputs.arguments.items()} | {"old_logprobs": inputs.old[rows]}
    row = int(torch.nonzero(good["response_mask"][:, 0])[0])

    def spoilt(name: str, value: object) -> Tensor:
        tensor = good[name].clone()
        tensor[row] = value
        return tensor

    spoils = [
        {"token_entropy": spoilt("token_entropy", float("nan"))},
        {"token_entropy": spoilt("token_entropy", -1.0)},
        {"token_entropy": good["token_entropy"].bfloat16()},
        {"rewards": spoilt("rewards", float("inf"))},
        {"response_mask": good["response_mask"].float()},
        {"group_ids": good["group_ids"][:-1]},
        {"rewards": None},
    ]
    messages = []
    for spoil in spoils:
        try:
            advantage_reducer.assign_credit(
                GTPOConfig(), **{**good, **(spoil if rank == 1 else {})}, dp_group=dist.group.WORLD
            )
        except GTPOError as error:
            messages.append(f"{type(error).__name__}: {error}")
    wrong_type = "gtpo" if rank == 1 else GTPOConfig()
    with pytest.raises(ConfigError, match="data-parallel rank 1: config: got str"):
        advantage_reducer.assign_credit(wrong_type, **good, dp_group=dist.group.WORLD)
    credit = assign_credit(GTPOConfig(), **good)
    bad = spoilt_advantages(credit.advantages, row) if rank == 1 else credit.advantages
    rest = {name: value for name, value in good.items() if name != "rewards"}
    with pytest.raises(DataError, match=r"data-parallel rank 1: advantages\[.*\] = nan"):
        prepare_update(KLCovConfig(), advantages=bad, **rest, reduction=reduction_over(dist.group.WORLD))
    config = GTPOConfig() if rank else replace(GTPOConfig(), alpha2=0.2)
    with pytest.raises(GTPOError, match="different algorithm configurations"):
        advantage_reducer.assign_credit(config, **good, dp_group=dist.group.WORLD)
    advantage_reducer.assign_credit(GTPOConfig(), **good, dp_group=dist.group.WORLD)
    return messages


@pytest.mark.slow
def test_bad_values_on_one_rank_raise_alike_on_all() -> None:
    results = run_ranks(run_with_bad_values, 3)
    assert results[0] == results[1] == results[2]
    kinds = [message.split(":")[0] for message in results[0]]
    assert kinds == ["DataError", "DataError", "ShapeError", "DataError", "ShapeError", "ShapeError", "ShapeError"]
    assert all("data-parallel rank 1: " in message for message in results[0])


TOKENS = 200
BYTES = 8 * TOKENS
"""Of one number a position."""


def count_bytes(rank: int, world_size: int, config: AlgorithmConfig, is_split: bool, masked: bool) -> dict[str, int]:
    """What a rank sends of two groups of 16 responses, each with ``TOKENS`` tokens between foreign ones.

    Args:
        rank: this one.
        world_size: 2.
        config: of the algorithm.
        is_split: both ranks hold half of each group, else one group each.
        masked: with shaped tokens.
    """
    rows = slice(rank, None, 2) if is_split else slice(16 * rank, 16 * rank + 16)
    reduction = ProcessGroupReduction(dist.group.WORLD)
    mask = (torch.arange(2 * TOKENS) % 2 == 0).repeat(16, 1)
    assign_credit(
        config,
        rewards=(torch.arange(32) // 2 % 4 < 2).float()[rows],
        token_entropy=torch.ones(16, 2 * TOKENS),
        response_mask=mask,
        group_ids=(torch.arange(32) // 16)[rows],
        shaped_tokens=mask if masked else None,
        reduction=reduction,
    )
    return reduction.sent_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "is_split", "masked", "sums"),
    [
        # two groups, two sides; a maximum and a sum; each of k = 2 ranks sends 2 (k - 1) / k = 1 of it
        (GTPOConfig(), True, False, 4 * 2 * BYTES),
        (GTPOConfig(), False, False, 4 * 2 * BYTES),
        (GTPOConfig(), True, True, 4 * 3 * BYTES),  # and a count
        (GTPOConfig(entropy_scope="batch"), True, False, 2 * 2 * BYTES),
        (GTPOConfig(entropy_axis="matrix"), True, False, 4 * 2 * 8),
        (GTPOConfig(entropy_axis="response"), True, False, 32 * 2 * 8),
        (GTPOConfig(entropy_mean="geometric"), True, False, 4 * 2 * BYTES),
        (GRPOSConfig(), True, False, 0),
        (GRPOConfig(), True, False, 0),
    ],
)
def test_a_maximum_and_a_sum_of_every_position_travel_once(
    config: AlgorithmConfig, is_split: bool, masked: bool, sums: int
) -> None:
    for sent in run_ranks(count_bytes, 2, config, is_split, masked):
        table = 16 * 3 * 8 + 8 + 2 * 2 * 8  # three numbers a response, their count, and twice a code and a digest
        means = 16 * 8 + 8 if isinstance(config, GRPOSConfig) else 0
        assert sent["all_gather"] == table + means
        assert sums <= sent["all_reduce"] < sums + 512


def _mask_on_rank_zero_only(rank: int, world_size: int) -> str:
    entropy, mask = torch.rand(3, 4) + 0.1, torch.ones(3, 4, dtype=torch.bool)
    try:
        advantage_reducer.assign_credit(
            GTPOConfig(),
            rewards=torch.tensor([1.0, 0.0, 1.0]),
            token_entropy=entropy,
            response_mask=mask,
            group_ids=torch.zeros(3, dtype=torch.int64),
            shaped_tokens=mask if rank == 0 else None,
            dp_group=dist.group.WORLD,
        )
    except ConfigError as error:
        return str(error)
    return "no error"


def test_shaped_tokens_on_some_ranks_only_is_refused_by_all() -> None:
    for message in run_ranks(_mask_on_rank_zero_only, 2):
        assert "on some of them only" in message


def _bad_type_on_rank_one(rank: int, world_size: int) -> str:
    try:
        advantage_reducer.assign_credit(
            GTPOConfig(),
            rewards=torch.tensor([1.0]),
            token_entropy=torch.ones(1, 1),
            response_mask=torch.ones(1, 1, dtype=torch.bool),
            group_ids=None if rank == 1 else torch.zeros(1, dtype=torch.int64),
            dp_group=dist.group.WORLD,
        )
    except GTPOError as error:
        return str(error)
    return "no error"


def test_any_error_on_one_rank_is_raised_by_all() -> None:
    for message in run_ranks(_bad_type_on_rank_one, 2):
        assert "data-parallel rank 1" in message
