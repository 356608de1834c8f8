"""Credit on the worked examples, the identities of the paper, and bad input."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import (
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
)
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.errors import DataError, ShapeError
from tests.reference import credit as reference
from tests.strategies import Batch, batches

GOLDEN = json.loads(Path(__file__).parents[2].joinpath("golden/cases.json").read_text())
CASES = GOLDEN["cases"]
EXACT = {"entropy_floor": 0.0}


def case_batch(name: str) -> Batch:
    given = CASES[name]["inputs"]
    return Batch(given["entropies"], given["rewards"], given["groups"])


def expected(name: str, key: str) -> Tensor:
    batch, value = case_batch(name), CASES[name][key]
    rows = value if isinstance(value[0], list) else [[v] * len(h) for v, h in zip(value, batch.entropies, strict=True)]
    return batch.matrix(rows)


def close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual.to(torch.float64), wanted.to(torch.float64), rtol=tolerance, atol=tolerance)


CLIPPED = {"alpha1": 0.9, "alpha2": 0.1, "kappa": 4.0}
GOLDEN_ADVANTAGES = [
    ("gtpo_v1", GTPOConfig, {"formulation": "v1"}),
    ("gtpo_v1_updated", GTPOConfig, {"formulation": "v1_clipped", **CLIPPED}),
    ("gtpo_v2", GTPOConfig, {"formulation": "v2"}),
    ("grpos_v1", GRPOSConfig, {"formulation": "v1"}),
    ("grpos_v2", GRPOSConfig, {"formulation": "v2"}),
    ("grpo", GRPOConfig, {}),
    ("token_mean_baseline", GTPOConfig, {"alpha2": 0.0}),
    *(
        (f"{kind}_v6", config, {"advantage_pool": pool})
        for kind, config in (("gtpo", GTPOConfig), ("grpos", GRPOSConfig))
        for pool in ("joint_zero", "per_set", "combined")
    ),
]


@pytest.mark.parametrize(("name", "ddof"), list(product(CASES, (0, 1))))
def test_golden_advantages(name: str, ddof: int) -> None:
    for kind, config, options in GOLDEN_ADVANTAGES:
        pool = f"[{options['advantage_pool']}]" if "advantage_pool" in options else ""
        wanted = expected(name, f"{kind}.adv{pool}[ddof{ddof}]")
        floor = {} if config is GRPOConfig else EXACT
        credit = assign_credit(config(std_ddof=ddof, **floor, **options), **case_batch(name).arguments())
        close(credit.advantages, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gtpo_v1", GTPOConfig(formulation="v1", **EXACT)),
        ("gtpo_v1_updated", GTPOConfig(formulation="v1_clipped", **CLIPPED, **EXACT)),
        ("gtpo_v2", GTPOConfig(formulation="v2", **EXACT)),
        ("gtpo_v6", GTPOConfig(**EXACT)),
        ("gtpo_v6_conserving", GTPOConfig(alpha1=0.9, **EXACT)),
        ("gtpo_v6_geometric", GTPOConfig(entropy_mean="geometric", **EXACT)),
        ("grpos_v1", GRPOSConfig(formulation="v1", **EXACT)),
        ("grpos_v2", GRPOSConfig(formulation="v2", **EXACT)),
        ("grpos_v6", GRPOSConfig(**EXACT)),
    ],
)
def test_golden_shaped_rewards(name: str, kind: str, config: GTPOConfig) -> None:
    batch = case_batch(name)
    shaped = assign_credit(config, **batch.arguments()).shaped_rewards
    correct = torch.tensor(batch.rewards, dtype=torch.bool)[:, None]
    keys = {key: key for key in CASES[name] if key.startswith(f"{kind}.shaped")}
    keys.pop(f"{kind}.shaped_length_penalty_L1den_successful", None)
    keys.pop(f"{kind}.shaped_length_penalty_L2den_successful_as_printed", None)
    assert keys
    for key in keys:
        side = correct if key.endswith("pos") else ~correct if key.endswith("neg") else torch.ones_like(correct)
        close(torch.where(side, shaped, 0.0), expected(name, key))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("denominator", "key"), [("l1", "L1den_successful"), ("l2", "L2den_successful_as_printed")])
def test_golden_length_penalty(name: str, denominator: str, key: str) -> None:
    penalty = SoftOverlongPenalty(max_tokens=4, buffer_tokens=2, denominator=denominator)
    config = GTPOConfig(formulation="v1_clipped", length_penalty=penalty, **CLIPPED, **EXACT)
    shaped = assign_credit(config, **case_batch(name).arguments()).shaped_rewards
    close(shaped, expected(name, f"gtpo_v1_updated.shaped_length_penalty_{key}"))


def test_only_the_quotient_of_the_alphas_matters() -> None:
    batch = case_batch("A_mixed_unequal_lengths")
    for alphas, pools in GOLDEN["alpha_invariance_case_A"].items():
        alpha1, alpha2 = map(float, alphas.split(","))
        for pool, wanted in pools.items():
            config = GTPOConfig(alpha1=alpha1, alpha2=alpha2, advantage_pool=pool, **EXACT)
            # 5 + 0.01 x in float32 shares: a part in 1e7 of x
            close(assign_credit(config, **batch.arguments()).advantages, batch.matrix(wanted), 2e-6)


@settings(max_examples=25)
@given(batches())
def test_conservation(batch: Batch) -> None:
    arguments = batch.arguments()
    correct = torch.tensor(batch.rewards, dtype=torch.bool)
    tokens = batch.lengths.double()
    v1 = assign_credit(GTPOConfig(formulation="v1", alpha2=0.3), **arguments).shaped_rewards.double()
    close(v1.sum(), 1.3 * tokens[correct].sum())
    v2 = assign_credit(GTPOConfig(formulation="v2"), **arguments).shaped_rewards.double()
    close(v2[~correct].sum(), -tokens[~correct].sum())
    v6 = assign_credit(GTPOConfig(alpha1=1.0, alpha2=0.5), **arguments).shaped_rewards.double()
    for label in set(batch.groups):
        for side, sign in ((correct, 1.0), (~correct, -1.0)):
            rows = side & (torch.tensor(batch.groups) == label)
            live = arguments["response_mask"][rows].sum(0)
            close(v6[rows].sum(0), sign * 1.5 * live)
    s6 = assign_credit(GRPOSConfig(beta2=0.5), **arguments).shaped_rewards.double()
    live = batch.lengths > 0
    close(s6[:, :1].sum(), 1.5 * ((correct & live).sum() - (~correct & live).sum()))


@settings(max_examples=25)
@given(batches(), st.sampled_from(["v1", "v6"]), st.sampled_from(["joint_zero", "combined"]), st.booleans())
def test_without_entropy_it_is_the_standardised_outcome(
    batch: Batch, formulation: str, pool: str, constant: bool
) -> None:
    if constant:
        batch = Batch([[0.7] * len(row) for row in batch.entropies], batch.rewards, batch.groups)
    alpha2 = 0.4 if constant else 0.0
    config = GTPOConfig(formulation=formulation, alpha2=alpha2, advantage_pool=pool, one_sided_groups="keep")
    actual = assign_credit(config, **batch.arguments()).advantages
    pooled = [r for r, row in zip(batch.rewards, batch.entropies, strict=True) for _ in row]
    wanted = [
        [reference.standardised(r, pooled, reference.Rules())] * len(row)
        for r, row in zip(batch.rewards, batch.entropies, strict=True)
    ]
    close(actual, batch.matrix(wanted), 2e-6)
    sequence = assign_credit(GRPOSConfig(beta2=0.0), **batch.arguments()).advantages
    close(sequence, assign_credit(GRPOConfig(), **batch.arguments()).advantages, 2e-6)


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_shares_do_not_depend_on_the_unit_of_entropy(factor: float) -> None:
    batch = Batch([[1.0, 2.0], [3.0, 0.5], [1.0], [4.0, 0.25]], [1, 1, 0, 0], [0] * 4)
    scaled = Batch([[h * factor for h in row] for row in batch.entropies], batch.rewards, batch.groups)
    for mean in ("arithmetic", "geometric"):
        config = GTPOConfig(entropy_floor=0.0, entropy_mean=mean)
        close(
            assign_credit(config, **scaled.arguments()).shaped_rewards,
            assign_credit(config, **batch.arguments()).shaped_rewards,
        )


def test_a_threshold_decides_membership_before_any_penalty() -> None:
    batch = Batch([[1.0] * 4, [2.0], [1.0, 3.0]], [0.6, 0.59, -1.0], [0, 0, 0])
    config = GTPOConfig(success_threshold=0.6, length_penalty=SoftOverlongPenalty(max_tokens=4, buffer_tokens=2))
    shaped = assign_credit(config, **batch.arguments()).shaped_rewards
    close(shaped[0], torch.full((4,), 0.1))  # 1.1 less a penalty of 1, still correct
    assert (shaped[1:, 0] < -1).all()


def test_group_relative_penalty_reaches_the_reward() -> None:
    for row in GOLDEN["grop_appendix_D"]:
        batch = Batch([[1.0] * n for n in row["lengths"]], row["rewards"], [0] * len(row["lengths"]))
        for minority in ("none", "incorrect"):
            penalty = GroupRelativeLengthPenalty(easy_threshold=row["gamma1"], correct_minority=minority)
            plain = assign_credit(GTPOConfig(), **batch.arguments()).shaped_rewards
            shaped = assign_credit(GTPOConfig(length_penalty=penalty), **batch.arguments()).shaped_rewards
            close((shaped - plain)[:, 0], torch.tensor(row[f"R[medium_minority={minority}]"]), 3e-7)


def test_excluded_tokens_are_neutral_and_enter_no_comparison() -> None:
    batch = Batch([[9.0, 1.0], [9.0, 3.0], [5.0, 1.0]], [1, 1, 0], [0] * 3)
    kept = torch.tensor([[False, True], [True, True], [True, True]])
    shaped = assign_credit(GTPOConfig(**EXACT), **batch.arguments(), shaped_tokens=kept).shaped_rewards
    close(shaped, torch.tensor([[1.1, 1.05], [1.1, 1.15], [-1.1, -1.1]]))
    sequence = assign_credit(GRPOSConfig(**EXACT), **batch.arguments(), shaped_tokens=kept).shaped_rewards
    close(sequence[:, 0], torch.tensor([1 + 0.1 * 1 / 3.5, 1 + 0.1 * 6 / 3.5, -1.1]))
    with pytest.raises(ShapeError, match="shapes nothing"):
        assign_credit(GRPOConfig(), **batch.arguments(), shaped_tokens=kept)


# ------------------------------------------------------------------------------------------------------------ bad input
def bad(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = dict(Batch([[1.0, 2.0], [1.0], [0.5, 0.5]], [1, 0, 0], [0, 0, 0]).arguments())
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


def spoilt(row: int, column: int, value: float):
    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[row, column] = value
        return tensor

    return spoil


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (bad(token_entropy=spoilt(2, 1, math.nan)), DataError, r"token_entropy\[2, 1\] = nan"),
        (bad(token_entropy=spoilt(0, 1, math.inf)), DataError, r"token_entropy\[0, 1\] = inf"),
        (bad(token_entropy=spoilt(0, 0, -2e-4)), DataError, r"token_entropy\[0, 0\] = -0.00019999"),
        (bad(rewards=torch.tensor([1.0, math.nan, 0.0])), DataError, r"rewards\[1\] = nan"),
        (bad(rewards=torch.tensor([1.0, 0.0, -math.inf])), DataError, r"rewards\[2\] = -inf"),
        (bad(token_entropy=lambda t: t.bfloat16()), ShapeError, r"token_entropy: got torch.bfloat16"),
        (bad(token_entropy=lambda t: t[0]), ShapeError, r"token_entropy: got 1 dimensions"),
        (bad(response_mask=lambda t: t.float()), ShapeError, r"response_mask: got torch.float32"),
        (bad(response_mask=lambda t: t[:, :1]), ShapeError, r"response_mask: got shape \(3, 1\), expected \(3, 2\)"),
        (bad(group_ids=lambda t: t[:2]), ShapeError, r"group_ids: got shape \(2,\), expected \(3,\)"),
        (bad(group_ids=lambda t: t.float()), ShapeError, r"group_ids: got torch.float32"),
        (bad(rewards=lambda t: t.to(torch.complex64)), ShapeError, r"rewards: got torch.complex64"),
        (bad(old_logprobs=torch.zeros(3, 1)), ShapeError, r"old_logprobs: got shape \(3, 1\)"),
        (bad(rewards=[1, 0, 0]), ShapeError, r"rewards: expected a tensor, got list"),
        (bad(shaped_tokens=torch.ones(3, 2)), ShapeError, r"shaped_tokens: got torch.float32"),
    ],
)
def test_bad_input_names_field_value_and_row(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        assign_credit(GTPOConfig(), **arguments)


@pytest.mark.parametrize("config", [GTPOConfig(**EXACT), GRPOSConfig(**EXACT, sequence_entropy_mean="geometric")])
def test_no_floor_under_a_zero_entropy(config: GTPOConfig) -> None:
    with pytest.raises(DataError, match="entropy_floor"):
        assign_credit(config, **bad(token_entropy=spoilt(1, 0, 0.0)))


def test_nothing_at_all() -> None:
    empty = {
        "rewards": torch.zeros(0),
        "token_entropy": torch.zeros(0, 4),
        "response_mask": torch.zeros(0, 4, dtype=torch.bool),
        "group_ids": torch.zeros(0, dtype=torch.int64),
    }
    columns = {
        "rewards": torch.ones(2),
        "token_entropy": torch.zeros(2, 0),
        "response_mask": torch.zeros(2, 0, dtype=torch.bool),
        "group_ids": torch.zeros(2, dtype=torch.int64),
    }
    for config in (GTPOConfig(), GTPOConfig(advantage_scope="group"), GRPOSConfig(), GRPOConfig()):
        assert assign_credit(config, **empty).advantages.shape == (0, 4)
        assert assign_credit(config, **columns).advantages.shape == (2, 0)


def test_no_gradient_flows_through_entropy() -> None:
    arguments = Batch([[1.0, 2.0], [1.0]], [1, 0], [0, 0]).arguments()
    arguments["token_entropy"].requires_grad_()
    for config in (GTPOConfig(), GRPOSConfig(), EntropyAdvantageConfig()):
        credit = assign_credit(config, **arguments)
        assert not credit.advantages.requires_grad
        assert not credit.shaped_rewards.requires_grad


@pytest.mark.parametrize(("alpha2", "turns"), [(0.24, False), (0.26, True)])
def test_signs_turn_where_docs_choosing_says(alpha2: float, turns: bool) -> None:
    """A share p of the tokens is wrong: from ``alpha2 = alpha1 (1 - p) / p`` on, 0.25 for 4 of 5."""
    batch = Batch([[0.5] * 3, *([[1.0] * 3] * 3), [1e-4] * 3], [1.0, -1.0, -1.0, -1.0, -1.0], [0] * 5)
    advantages = assign_credit(GTPOConfig(alpha2=alpha2), **batch.arguments()).advantages
    assert bool((advantages[1:4] > 0).all()) == turns
    assert bool((advantages[1:4] < 0).all()) != turns
