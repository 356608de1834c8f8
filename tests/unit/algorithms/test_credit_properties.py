"""Credit against the scalar loops over all options, and what must not change a bit: order, holes, padding, sharding.

``make fuzz`` does the same with fresh seeds for as long as one likes.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.registry import BUILT_IN
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.config.algorithm import AlgorithmConfig, EntropyAdvantageConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from tests import credit_fuzz
from tests.credit_cases import Case
from tests.strategies import Batch, batches, moved, random_batch, with_holes

ALL = [
    *(record.config() for record in BUILT_IN),
    GTPOConfig(entropy_axis="response", formulation="v2"),
    GTPOConfig(entropy_axis="matrix", entropy_mean="geometric", entropy_scope="batch", advantage_pool="per_set"),
    ControlConfig(weight_source="shuffled", advantage_scope="group", one_sided_groups="keep"),
    ControlConfig(weight_source="surprisal", formulation="v1"),
    GRPOSConfig(entropy_mean="geometric", sequence_entropy_mean="geometric", advantage_pool="combined"),
]
IDS = [f"{i}-{type(config).__name__}" for i, config in enumerate(ALL)]


# -------------------------------------------------------------------------------------------------------- scalar loops
def options(**extra: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "formulation": st.sampled_from(["v1", "v1_clipped", "v2", "v2_clipped", "v6"]),
            "entropy_scope": st.sampled_from(["group", "batch"]),
            "entropy_mean": st.sampled_from(["arithmetic", "geometric"]),
            "advantage_scope": st.sampled_from(["group", "batch"]),
            "advantage_pool": st.sampled_from(["joint_zero", "per_set", "combined"]),
            "one_sided_groups": st.sampled_from(["zero", "keep"]),
            "entropy_floor": st.sampled_from([1e-8, 1e-3]),
            "entropy_clip": st.sampled_from([None, (0.1, 2.0)]),
            "std_ddof": st.sampled_from([0, 1]),
            "std_eps": st.sampled_from([0.0, 6e-5, 1e-3]),
            **extra,
        }
    )


def resolve(chosen: dict, first: str) -> dict:
    """``v1_clipped`` and ``v2_clipped`` come with the constants that they need."""
    chosen = dict(chosen)
    if chosen["formulation"].endswith("_clipped"):
        chosen |= {f"{first}1": 0.9, f"{first}2": 0.1, "kappa": 4.0}
        chosen["formulation"] = chosen["formulation"].replace("v2_clipped", "v2")
    return chosen


def assert_like_the_loops(config: AlgorithmConfig, batch: Batch) -> None:
    case = Case(config, batch.entropies, batch.rewards, batch.groups, [[-1.0] * len(row) for row in batch.entropies])
    found = credit_fuzz.run(case, case.arguments(random.Random(0), most_holes=0), Reduction())
    assert not found.refusal
    assert list(credit_fuzz.unlike_the_loops(case, found)) == []


wide = st.floats(0.05, 8.0).map(lambda v: float(torch.tensor(v, dtype=torch.float32)))


@settings(max_examples=80)
@given(batches(values=wide), options(entropy_axis=st.sampled_from(["position", "response", "matrix"])))
def test_gtpo_equals_the_loops(batch: Batch, chosen: dict) -> None:
    assert_like_the_loops(GTPOConfig(**resolve(chosen, "alpha")), batch)


@settings(max_examples=60)
@given(batches(values=wide), options(sequence_entropy_mean=st.sampled_from(["arithmetic", "geometric"])))
def test_grpo_s_equals_the_loops(batch: Batch, chosen: dict) -> None:
    assert_like_the_loops(GRPOSConfig(**resolve(chosen, "beta")), batch)


@pytest.mark.parametrize("block", range(6))
def test_random_batches_over_all_options(block: int) -> None:
    """What ``make fuzz`` tries, on seeds that stay."""
    for seed in range(50 * block, 50 * block + 50):
        case, problem = credit_fuzz.tried(seed)
        assert problem is None, f"python -m tests.credit_fuzz --seed {seed}: {problem}\n{case!r}"


# ------------------------------------------------------------------------------------------ nothing else changes a bit
@settings(max_examples=30)
@given(
    batches(), st.randoms(use_true_random=False), st.integers(0, 5), st.sampled_from([0.0, math.nan, math.inf, -9.0])
)
def test_permutation_padding_and_labels_change_no_bit(batch: Batch, draw, extra: int, padding: float) -> None:
    order = list(range(len(batch.rewards)))
    draw.shuffle(order)
    for config in (GTPOConfig(), GTPOConfig(entropy_mean="geometric", entropy_axis="matrix"), GRPOSConfig()):
        base = assign_credit(config, **batch.arguments())
        other_batch = batch.select(order)
        other_batch.groups = [5 - g for g in other_batch.groups]
        other = assign_credit(config, **other_batch.arguments(extra=extra, padding=padding))
        width = base.advantages.shape[1]
        assert torch.equal(other.advantages[:, :width], base.advantages[order])
        assert torch.equal(other.shaped_rewards[:, :width], base.shaped_rewards[order])
        assert not other.advantages[:, width:].any()


@pytest.mark.parametrize("foreign", [math.nan, -9.0])
@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_foreign_tokens_anywhere_change_no_bit(config: AlgorithmConfig, foreign: float) -> None:
    """``t`` counts the policy's own tokens: what somebody else wrote between them moves nobody to another column."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        arguments = random_batch(seed, num_groups=3, group_size=5, max_tokens=9).arguments()
        own = arguments["response_mask"]
        arguments["old_logprobs"] = -3 * torch.rand(own.shape, generator=generator)
        arguments["teacher_logprobs"] = -3 * torch.rand(own.shape, generator=generator)
        base = assign_credit(config, **arguments)
        mask = with_holes(own, 7, generator)
        for name in ("token_entropy", "old_logprobs", "teacher_logprobs"):
            arguments[name] = moved(arguments[name], own, mask, foreign)
        found = assign_credit(config, **{**arguments, "response_mask": mask})
        assert torch.equal(found.advantages[mask], base.advantages[own])
        assert torch.equal(found.shaped_rewards[mask], base.shaped_rewards[own])
        assert not found.advantages[~mask].any()
        assert not found.shaped_rewards[~mask].any()
        assert found.metrics == base.metrics


def groups_of_four(*rewards: float) -> dict:
    """Arguments of ``assign_credit`` for responses of 1 to 6 tokens, four to a group."""
    draw = random.Random(len(rewards))
    rows = [[draw.uniform(0.0, 3.0) for _ in range(draw.randint(1, 6))] for _ in rewards]
    arguments = Batch(rows, list(rewards), [row // 4 for row in range(len(rewards))]).arguments()
    logprobs = -arguments["token_entropy"] - 0.1
    return arguments | {"old_logprobs": logprobs, "teacher_logprobs": logprobs}


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_a_response_without_a_verdict_leaves_its_siblings_a_smaller_group(config: AlgorithmConfig) -> None:
    """One of four, three of four (one is left, without peers) and all of them."""
    for missing in ([5], [5, 6, 7], [4, 5, 6, 7]):
        arguments = groups_of_four(1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0)
        own = arguments["response_mask"]
        arguments["rewards"][missing] = 77.0  # no verdict: the value has no meaning
        kept = torch.ones(12, dtype=torch.bool)
        kept[missing] = False
        found = assign_credit(config, **{**arguments, "response_mask": own & kept[:, None]})
        smaller = assign_credit(config, **{name: tensor[kept] for name, tensor in arguments.items()})
        assert torch.equal(found.advantages[kept], smaller.advantages)
        assert torch.equal(found.shaped_rewards[kept], smaller.shaped_rewards)
        assert found.metrics == smaller.metrics
        assert not found.advantages[~kept].any()


def above(value: float, dtype: torch.dtype, steps: int) -> float:
    """The ``steps``-th number of the dtype after ``value``."""
    number = torch.tensor(value, dtype=dtype)
    for _ in range(steps):
        number = torch.nextafter(number, torch.tensor(math.inf, dtype=dtype))
    return float(number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_rewards_that_differ_by_rounding_have_no_advantage(config: AlgorithmConfig, dtype: torch.dtype) -> None:
    """Weighted sums of one value, added in other orders, and the numbers beside some values."""
    groups = [
        [0.1 + 0.2, 0.3, 0.3, 0.1 * 3],
        [0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1, 0.0],
        [0.7 + 0.1, 0.8, 0.1 + 0.7, 1.0 - 0.2],
        *([value, above(value, dtype, 1), value, above(value, dtype, 2)] for value in (1 / 3, 1.0, -2.7, 999.9)),
    ]
    if getattr(config, "one_sided_groups", "zero") == "keep":
        return  # such a group then has advantages of its entropies
    for rewards in groups:
        arguments = groups_of_four(*rewards) | {"rewards": torch.tensor(rewards, dtype=dtype)}
        assert not assign_credit(config, **arguments).advantages.any(), rewards


def test_a_spread_above_rounding_is_one() -> None:
    """The scale of rewards is the user's: 1e-5 is a spread of full size, unless ``std_eps`` says otherwise."""
    arguments = Batch([[1.0], [1.0]], [1.0, 1.00001], [0, 0]).arguments()
    assert assign_credit(GRPOConfig(), **arguments).advantages.flatten().tolist() == pytest.approx([-1.0, 1.0])
    small = assign_credit(GRPOConfig(std_eps=1e-3), **arguments).advantages
    assert float(small.abs().max()) == pytest.approx(0.005, rel=0.01)


@pytest.mark.parametrize("advantage_pool", ["joint_zero", "per_set", "combined"])
@pytest.mark.parametrize("advantage_scope", ["batch", "group"])
@pytest.mark.parametrize("config", [GTPOConfig, GRPOSConfig])
def test_groups_without_variance_have_no_advantage_and_change_nobodys(
    config: type[AlgorithmConfig], advantage_scope: str, advantage_pool: str
) -> None:
    """All right, mixed, all wrong. Kept, the entropies of the first and the last are a spread like any other."""
    arguments = groups_of_four(1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0)
    mask, mixed = arguments["response_mask"], torch.arange(12) // 4 == 1
    chosen = {"advantage_scope": advantage_scope, "advantage_pool": advantage_pool}
    for formulation in ("v1", "v2", "v6"):
        zeroed = config(**chosen, formulation=formulation)
        found = assign_credit(zeroed, **arguments).advantages
        assert not found[~mixed].any()
        alone = assign_credit(zeroed, **{name: tensor[mixed] for name, tensor in arguments.items()}).advantages
        assert torch.equal(found[mixed], alone)
        kept = assign_credit(config(**chosen, formulation=formulation, one_sided_groups="keep"), **arguments).advantages
        assert kept[~mixed].any()
        assert torch.isfinite(kept[mask]).all()


@pytest.mark.parametrize("floor", [1e-8, 1e-3])
@pytest.mark.parametrize("zeros", [1, 2, 3, 4])
def test_entropies_of_0_share_the_blame_of_their_position_and_no_more(zeros: int, floor: float) -> None:
    """``y`` has mean 1 over the ``h_t`` wrong responses whatever they are, so that no share is above ``h_t``."""
    peaked = torch.tensor([0.0, 3e-5, 0.7, 1.1]).bfloat16().float().tolist()
    rows = [[0.0] * 2 if row < zeros else [peaked[row], peaked[-row]] for row in range(4)] + [[0.5, 0.5]]
    shaped = assign_credit(
        GTPOConfig(alpha1=0.0, alpha2=1.0, entropy_floor=floor), **Batch(rows, [0] * 4 + [1], [0] * 5).arguments()
    ).shaped_rewards
    share = -shaped[:4].double()
    torch.testing.assert_close(share.sum(0), torch.full((2,), 4.0).double(), rtol=1e-6, atol=0)
    assert float(share.max()) <= 4.0
    torch.testing.assert_close(share[:zeros, 0], share[:1, 0].expand(zeros))  # of equals nobody takes more
    if floor == 1e-8 and zeros == 1:
        assert float(share[0, 0]) > 3.99, "nearly all of it: docs/algorithms.md says what tames it"


@pytest.mark.parametrize(("floor", "padding", "dtype"), [(1.0, -1.0, torch.float32), (1e-8, -1e-8, torch.float64)])
def test_padding_of_minus_the_floor_changes_nothing(floor: float, padding: float, dtype: torch.dtype) -> None:
    """Its inverse, once the floor is added, is infinite; times 0 that would be NaN in everybody's column."""
    entropy = torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.7, 0.0], [1.0, 2.0]], dtype=dtype)
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    arguments = {
        "rewards": torch.tensor([1.0, 1.0, 0.0, 0.0]),
        "response_mask": mask,
        "group_ids": torch.zeros(4).long(),
    }
    clean = assign_credit(GTPOConfig(entropy_floor=floor), token_entropy=entropy, **arguments)
    entropy[2, 1] = padding
    found = assign_credit(GTPOConfig(entropy_floor=floor), token_entropy=entropy, **arguments)
    assert torch.equal(found.shaped_rewards, clean.shaped_rewards)
    assert torch.equal(found.advantages, clean.advantages)


# --------------------------------------------------------------------------------------------------- found by searching
# Pools of one value, or of equal values, for which bounds and a threshold gave advantages of 4.0 and 8.0.
KEEP = {"one_sided_groups": "keep", "entropy_scope": "batch", "advantage_scope": "group"}
CONSTANT_POOLS = [
    (
        {**KEEP, "formulation": "v1", "entropy_axis": "matrix"},
        [[1.0, 1.0, 1.0, 1.0, 2.0], [], [1.25], []],
        [1, 0, 1, 0],
        [0, 0, 1, 0],
        [2],
    ),
    (
        {**KEEP, "advantage_pool": "per_set", "entropy_axis": "matrix"},
        [[3.0], [], [3.0, 2.0], [1.25]],
        [0, 1, 0, 0],
        [2, 2, 0, 1],
        [0, 3],
    ),
    (
        {**KEEP, "formulation": "v2", "advantage_pool": "per_set", "entropy_axis": "matrix"},
        [[], [0.7], [], [1.0], [0.5, 0.5]],
        [0, 1, 0, 0, 1],
        [2, 1, 2, 2, 0],
        [1, 3, 4],
    ),
    (
        {**KEEP, "advantage_pool": "per_set", "entropy_floor": 0.001, "entropy_clip": (0.1, 2.0)},
        [[1.0], [1.0, 0.7, 0.7, 0.7, 0.5], [1.0, 1.0, 1.0, 0.7, 1.0], [1.25]],
        [0, 1, 0, 1],
        [1, 1, 2, 0],
        [0, 3],
    ),
    (
        {**KEEP, "advantage_pool": "combined", "entropy_clip": (0.1, 2.0), "entropy_axis": "matrix"}
        | {"alpha1": 0.1, "alpha2": 1.0},
        [[], [0.08], [2.33, 0.3], [1.09], [4.73], [7.5]],
        [1] * 6,
        [2, 0, 0, 2, 0, 1],
        [3, 5],
    ),
    (
        {**KEEP, "formulation": "v2", "advantage_pool": "combined", "alpha1": 0.1, "alpha2": 1.0},
        [[7.1, 0.51], [7.26], [5.93], [0.45], [7.46]],
        [1, 0, 1, 1, 0],
        [0, 0, 0, 2, 1],
        [3, 4],
    ),
    (
        {**KEEP, "advantage_pool": "per_set", "alpha1": 0.0, "alpha2": 1.0},
        [[3.0], [0.5, 0.5, 1.0, 2.0, 1.0], [1.25]],
        [1, 0, 0],
        [0, 2, 1],
        [0, 2],
    ),
]


@pytest.mark.parametrize("std_eps", [0.0, 6e-5])
@pytest.mark.parametrize(("chosen", "entropies", "rewards", "groups", "constant"), CONSTANT_POOLS)
def test_a_pool_is_constant_if_its_values_are_equal(
    chosen: dict, entropies: list, rewards: list, groups: list, constant: list[int], std_eps: float
) -> None:
    batch = Batch(entropies, rewards, groups)
    config = GTPOConfig(**chosen, std_eps=std_eps)
    advantages = assign_credit(config, **batch.arguments()).advantages
    assert not advantages[constant].any()
    assert_like_the_loops(config, batch)


def test_rounding_below_zero_counts_as_zero() -> None:
    batch = Batch([[-5e-5, 1.0], [0.5, 1.0]], [1, 0], [0, 0])
    clean = Batch([[0.0, 1.0], [0.5, 1.0]], [1, 0], [0, 0])
    for config in (GTPOConfig(), GRPOSConfig(), EntropyAdvantageConfig()):
        left, right = (assign_credit(config, **b.arguments()).advantages for b in (batch, clean))
        assert torch.equal(left, right)
