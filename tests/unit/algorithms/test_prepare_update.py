"""What an update needs of the whole batch."""

import math

import pytest
import torch

from gtpo_megatron.algorithms import Credit, assign_credit, prepare_update
from gtpo_megatron.algorithms.registry import BUILT_IN
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    ClipCovConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    OffPolicyConfig,
    TopEntropyConfig,
)
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from tests.strategies import Batch, moved, random_batch, with_holes

BATCH = Batch([[1.0, 5.0, 2.0], [4.0, 3.0], [0.5, 6.0], []], [1, 0, 1, 0], [0, 0, 1, 1])
OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, 0.0], [-2.0, -4.0, 0.0], [0.0, 0.0, 0.0]])


def spoilt(tensor: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


def prepare(config: AlgorithmConfig, *, advantages: torch.Tensor | None = None, **changes: object):
    arguments = BATCH.arguments()
    credit = assign_credit(config, **arguments)
    if advantages is not None:
        credit = Credit(shaped_rewards=credit.shaped_rewards, advantages=advantages, metrics={})
    arguments.pop("rewards")
    return prepare_update(config, advantages=credit.advantages, **{"old_logprobs": OLD, **arguments, **changes})


def test_top_entropy_takes_a_fraction_of_the_batch() -> None:
    assert prepare(TopEntropyConfig(top_fraction=0.4)).token_selection.tolist() == [
        [False, True, False],
        [False, False, False],
        [False, True, False],
        [False, False, False],
    ]
    assert int(prepare(TopEntropyConfig(top_fraction=1e-9)).token_selection.sum()) == 1
    assert int(prepare(TopEntropyConfig(top_fraction=1.0)).token_selection.sum()) == 7


def test_kl_cov_takes_the_highest_covariance() -> None:
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0], [2.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    live = BATCH.arguments()["response_mask"]
    covariance = (OLD - OLD[live].mean()) * (advantages - advantages[live].mean())
    wanted = live & (covariance >= covariance[live].sort(descending=True).values[1])
    assert torch.equal(prepare(KLCovConfig(penalised_fraction=0.3), advantages=advantages).token_selection, wanted)
    none = prepare(KLCovConfig(penalised_fraction=0.0), advantages=advantages)
    assert not none.token_selection.any()


def test_clip_cov_chooses_within_its_band_by_seed() -> None:
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0], [2.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    live = BATCH.arguments()["response_mask"]
    covariance = (OLD - OLD[live].mean()) * (advantages - advantages[live].mean())
    band = live & (covariance >= -1.0) & (covariance <= 3.0)
    choices = set()
    for seed in range(12):
        config = ClipCovConfig(clip_fraction=0.15, cov_low=-1.0, cov_high=3.0, seed=seed)
        chosen = prepare(config, advantages=advantages).token_selection
        assert int(chosen.sum()) == 1
        assert bool((chosen <= band).all())
        choices.add(int(chosen.flatten().nonzero()[0]))
    assert len(choices) > 1


def test_row_weights_of_groups_add_up_to_one() -> None:
    weights = prepare(GTPOConfig(loss_denominator="group")).row_weights
    assert weights.tolist() == [1 / 5, 1 / 5, 1 / 2, 0]


def test_correction_and_its_statistics() -> None:
    sampled = OLD - torch.tensor([[0.0, 0.1, 1.0], [0.0, 0.0, 9.0], [-1.0, 0.0, 9.0], [9.0, 9.0, 9.0]])
    sampled = sampled.clamp(max=0.0)
    truncated = prepare(GTPOConfig(off_policy=OffPolicyConfig(mode="truncate", upper=2.0)), rollout_logprobs=sampled)
    assert truncated.token_weights[0].tolist() == pytest.approx([1.0, math.exp(0.1), 2.0])
    masked = prepare(
        GTPOConfig(off_policy=OffPolicyConfig(mode="mask", lower=0.5, upper=2.0)), rollout_logprobs=sampled
    )
    assert masked.token_weights[0].tolist() == pytest.approx([1.0, math.exp(0.1), 0.0])
    assert masked.token_weights[2, 0] == 0
    sequence = prepare(
        GSPOConfig(off_policy=OffPolicyConfig(mode="truncate", level="sequence", upper=9.0)), rollout_logprobs=sampled
    )
    assert sequence.token_weights[0].tolist() == pytest.approx([math.exp(1.1)] * 3)
    geometric = prepare(
        GSPOConfig(off_policy=OffPolicyConfig(mode="truncate", level="geometric", upper=9.0)), rollout_logprobs=sampled
    )
    assert geometric.token_weights[0].tolist() == pytest.approx([math.exp(1.1 / 3)] * 3)
    vetoed = prepare(GTPOConfig(off_policy=OffPolicyConfig(veto_nats=0.5)), rollout_logprobs=sampled)
    assert vetoed.token_weights[:3].sum(1).tolist() == [0.0, 3.0, 0.0]  # the fourth has no token of its own
    share = vetoed.statistics["off_policy/vetoed_frac"]
    assert (float(share.total), float(share.count)) == (2, 3)
    both = prepare(GTPOConfig(off_policy=OffPolicyConfig(mode="truncate", veto_nats=1.05)), rollout_logprobs=sampled)
    assert torch.equal(both.token_weights, truncated.token_weights)
    off = prepare(GTPOConfig(), rollout_logprobs=sampled)
    assert off.token_weights is None
    gap = off.statistics["off_policy/logprob_gap_mean"]
    assert (float(gap.total), float(gap.count)) == (pytest.approx(2.1), 7)
    assert float(off.statistics["off_policy/outside_frac"].total) == 1  # exp(1) > 2
    ratio = off.statistics["off_policy/ratio_mean"]
    assert float(ratio.total) == pytest.approx(4 + math.exp(0.1) + math.exp(1.0) + math.exp(-1.0), rel=1e-6)
    assert prepare(GTPOConfig()).statistics == {}


def test_rows_are_cut_together() -> None:
    config = TopEntropyConfig(off_policy=OffPolicyConfig(mode="truncate"))
    update = prepare(config, rollout_logprobs=OLD)
    cut = update.select([2, 0], 2)
    assert torch.equal(cut.old_logprobs, OLD[[2, 0], :2])
    assert torch.equal(cut.advantages, update.advantages[[2, 0], :2])
    assert cut.row_weights.shape == (2,)
    assert cut.token_weights.shape == (2, 2)
    assert torch.equal(cut.token_selection, update.token_selection[[2, 0], :2])
    assert cut.denominator is update.denominator
    assert update.select([]).advantages.shape == (0, 3)


@pytest.mark.parametrize(
    ("config", "changes", "error", "message"),
    [
        (GTPOConfig(), {"old_logprobs": OLD.bfloat16()}, ShapeError, "old_logprobs: got torch.bfloat16"),
        (GTPOConfig(), {"old_logprobs": OLD[:, :2]}, ShapeError, "old_logprobs: got shape"),
        (GTPOConfig(), {"old_logprobs": OLD + 1}, DataError, r"old_logprobs\[1, 0\] = 0.5: .* <= 0.0001"),
        (GTPOConfig(), {"old_logprobs": OLD * math.inf}, DataError, r"old_logprobs\[0, 0\] = -inf"),
        (GTPOConfig(), {"rollout_logprobs": OLD[:2]}, ShapeError, "rollout_logprobs: got shape"),
        (GTPOConfig(), {"rollout_logprobs": OLD * math.nan}, DataError, r"rollout_logprobs\[0, 0\] = nan"),
        (GTPOConfig(off_policy=OffPolicyConfig(mode="mask")), {}, ShapeError, "rollout_logprobs: got None"),
        (KLCovConfig(), {"advantages": OLD / 0.0}, DataError, r"advantages\[0, 0\] = -inf"),
        (GTPOConfig(), {"advantages": spoilt(OLD, 1, 1, math.nan)}, DataError, r"advantages\[1, 1\] = nan"),
        (GTPOConfig(), {"advantages": OLD.bfloat16()}, ShapeError, "advantages: got torch.bfloat16"),
        (
            TopEntropyConfig(),
            {"token_entropy": spoilt(-OLD, 2, 1, math.nan)},
            DataError,
            r"token_entropy\[2, 1\] = nan: expected a finite value >= -0.0001",
        ),
    ],
)
def test_bad_input(config: AlgorithmConfig, changes: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        prepare(config, **changes)


def test_values_outside_the_mask_do_not_matter() -> None:
    advantages = spoilt(torch.zeros(4, 3), 1, 2, math.nan)
    entropy = spoilt(BATCH.arguments()["token_entropy"], 3, 0, math.nan)
    assert prepare(TopEntropyConfig(), advantages=advantages, token_entropy=entropy).token_selection.any()


def test_a_name_is_no_configuration() -> None:
    credit = assign_credit(GTPOConfig(), **BATCH.arguments())
    rest = {name: value for name, value in BATCH.arguments().items() if name != "rewards"}
    with pytest.raises(ConfigError, match=r"config: got str \('gtpo'\), expected one of GTPOConfig, GRPOSConfig"):
        prepare_update("gtpo", advantages=credit.advantages, old_logprobs=OLD, **rest)


@pytest.mark.parametrize("config", [record.config() for record in BUILT_IN], ids=lambda config: type(config).__name__)
def test_foreign_tokens_anywhere_change_nothing(config: AlgorithmConfig) -> None:
    """Somebody else's tokens between the policy's own: the same tokens are chosen, and every row weighs the same."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        batch = random_batch(seed, num_groups=3, group_size=4, max_tokens=8)
        arguments = batch.arguments()
        shape = arguments["token_entropy"].shape
        arguments["old_logprobs"] = -3 * torch.rand(shape, generator=generator)
        sampled = (arguments["old_logprobs"] + 0.1 * torch.randn(shape, generator=generator)).clamp(max=0)
        credit = assign_credit(config, **arguments, teacher_logprobs=arguments["old_logprobs"])
        rest = {name: value for name, value in arguments.items() if name != "rewards"}
        whole = prepare_update(config, advantages=credit.advantages, rollout_logprobs=sampled, **rest)
        own = arguments["response_mask"]

        mask = with_holes(own, 5, generator)
        spread = {name: moved(rest[name], own, mask) for name in ("token_entropy", "old_logprobs")}
        found = prepare_update(
            config,
            advantages=moved(credit.advantages, own, mask),
            rollout_logprobs=moved(sampled, own, mask),
            response_mask=mask,
            group_ids=rest["group_ids"],
            **spread,
        )
        assert torch.equal(found.row_weights, whole.row_weights)
        assert torch.equal(found.denominator, whole.denominator)
        if whole.token_selection is not None:
            assert torch.equal(found.token_selection[mask], whole.token_selection[own])
            assert not found.token_selection[~mask].any()
        for name, statistic in whole.statistics.items():
            assert float(found.statistics[name].total) == pytest.approx(float(statistic.total), rel=1e-6)
            assert float(found.statistics[name].count) == float(statistic.count)
