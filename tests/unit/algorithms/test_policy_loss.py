"""Losses against the worked examples, scalar loops, finite differences and every way of cutting a batch."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gtpo_megatron.algorithms import LossTerms, UpdateBatch, assign_credit, policy_loss, prepare_update, update_loss
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DPPOConfig,
    DrGRPOConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    OffPolicyConfig,
    ReferenceKLConfig,
    TopEntropyConfig,
)
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from tests.reference import losses as reference
from tests.strategies import Batch, moved, random_batch, with_holes

CASES = json.loads(Path(__file__).parents[2].joinpath("golden/cases.json").read_text())["cases"]
ALL = [
    GTPOConfig(),
    GTPOConfig(loss_denominator="group"),
    GRPOSConfig(),
    GRPOSConfig(ratio_mean="geometric", loss_denominator="group"),
    GRPOConfig(),
    GRPOConfig(loss_denominator="group"),
    DAPOConfig(dual_clip=2.0),
    DrGRPOConfig(norm_tokens=10),
    GSPOConfig(),
    CISPOConfig(),
    EntropyAdvantageConfig(),
    TopEntropyConfig(),
    ClipCovConfig(clip_fraction=0.1, cov_low=0.01),
    KLCovConfig(penalised_fraction=0.2),
    GTPOConfig(off_policy=OffPolicyConfig(mode="truncate", upper=1.05)),
    GSPOConfig(off_policy=OffPolicyConfig(mode="mask", level="geometric", lower=0.9, upper=1.1)),
]
IDS = [f"{i}-{type(config).__name__}" for i, config in enumerate(ALL)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("gtpo_v1.objective[adv[ddof0]][batch_token_mean]", GTPOConfig(formulation="v1", entropy_floor=0.0)),
        ("gtpo_v2.objective[adv[ddof0]][batch_token_mean]", GTPOConfig(formulation="v2", entropy_floor=0.0)),
        ("gtpo_v6.objective[adv[joint_zero][ddof0]][batch_token_mean]", GTPOConfig(entropy_floor=0.0)),
        *(
            (
                f"grpos_{v}.objective[{adv}][ratio={mean}]",
                GRPOSConfig(formulation=v, ratio_mean=mean, entropy_floor=0.0),
            )
            for v, adv in (("v1", "adv[ddof0]"), ("v2", "adv[ddof0]"), ("v6", "adv[joint_zero][ddof0]"))
            for mean in ("arithmetic", "geometric")
        ),
    ],
)
def test_golden_objective_and_gradient(name: str, key: str, config: AlgorithmConfig) -> None:
    case = CASES[name]
    batch = Batch(case["inputs"]["entropies"], case["inputs"]["rewards"], case["inputs"]["groups"])
    arguments = batch.arguments()
    advantages = assign_credit(config, **arguments).advantages
    logprobs = batch.matrix(case["logprobs"]["new"]).requires_grad_()
    terms = policy_loss(
        config,
        logprobs=logprobs,
        old_logprobs=batch.matrix(case["logprobs"]["old"]),
        advantages=advantages,
        response_mask=arguments["response_mask"],
    )
    loss = terms.loss_sum / terms.weight
    loss.backward()
    wanted = case[f"{key}[eps 0.2/0.28]"]
    assert loss.item() == pytest.approx(-wanted["J"], abs=1e-6)
    torch.testing.assert_close(-logprobs.grad, batch.matrix(wanted["grad_logp_new"]), rtol=2e-6, atol=1e-6)


def problem(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Batch, dict[str, Tensor], Tensor, Tensor, Tensor]:
    """A batch, its credit arguments, old, new and sampler's log-probs."""
    batch = random_batch(seed, num_groups=4, group_size=5, max_tokens=7)
    arguments = batch.arguments()
    generator = torch.Generator().manual_seed(seed)
    shape = arguments["token_entropy"].shape
    old = -3 * torch.rand(shape, generator=generator, dtype=dtype) - 0.6
    new = old + 0.3 * torch.randn(shape, generator=generator, dtype=dtype)
    sampled = (old + 0.1 * torch.randn(shape, generator=generator, dtype=dtype)).clamp(max=0)
    return batch, arguments, old, new, sampled


def prepared(config: AlgorithmConfig, arguments: dict, old: Tensor, sampled: Tensor):
    credit = assign_credit(config, **arguments)
    rest = {name: value for name, value in arguments.items() if name != "rewards"}
    return prepare_update(config, advantages=credit.advantages, old_logprobs=old, rollout_logprobs=sampled, **rest)


def lists(batch: Batch, matrix: Tensor) -> list[list[float]]:
    return [row[: len(h)] for row, h in zip(matrix.tolist(), batch.entropies, strict=True)]


@pytest.mark.parametrize("seed", [0, 1])
def test_losses_equal_the_loops(seed: int) -> None:
    batch, arguments, old, new, _ = problem(seed)
    tokens = {"logprobs": new, "old_logprobs": old, "response_mask": arguments["response_mask"]}
    live = [i for i, row in enumerate(batch.entropies) if row]
    new_rows, old_rows = lists(batch, new), lists(batch, old)
    for config in (GTPOConfig(), GTPOConfig(loss_denominator="group"), GRPOConfig(), DrGRPOConfig(norm_tokens=10)):
        advantages = assign_credit(config, **arguments).advantages
        terms = policy_loss(config, advantages=advantages, group_ids=arguments["group_ids"], **tokens)
        a = lists(batch, advantages)
        clip = (config.clip_eps_low, config.clip_eps_high)
        if isinstance(config, GRPOConfig):
            wanted = sum(reference.token_mean([new_rows[i]], [old_rows[i]], [a[i]], *clip) for i in live) / len(live)
        elif isinstance(config, DrGRPOConfig):
            count = sum(len(row) for row in batch.entropies)
            wanted = reference.token_mean(new_rows, old_rows, a, *clip) * count / (10 * len(live))
        elif config.loss_denominator == "group":
            wanted = reference.group_token_mean(new_rows, old_rows, a, batch.groups, *clip)
        else:
            wanted = reference.token_mean(new_rows, old_rows, a, *clip)
        assert (terms.loss_sum / terms.weight).item() == pytest.approx(-wanted, rel=1e-6)
    for config in (GRPOSConfig(), GRPOSConfig(ratio_mean="geometric"), GSPOConfig()):
        advantages = assign_credit(config, **arguments).advantages
        terms = policy_loss(config, advantages=advantages, **tokens)
        wanted = reference.sequence_mean(
            [new_rows[i] for i in live],
            [old_rows[i] for i in live],
            [float(advantages[i, 0]) for i in live],
            config.clip_eps_low,
            config.clip_eps_high,
            geometric=isinstance(config, GSPOConfig) or config.ratio_mean == "geometric",
        )
        assert (terms.loss_sum / terms.weight).item() == pytest.approx(-wanted, rel=1e-6)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_gradient_equals_finite_differences(config: AlgorithmConfig) -> None:
    _, arguments, old, new, sampled = problem(3)
    update = prepared(config, arguments, old, sampled)
    everything = update.select(range(len(old)))

    def loss(logprobs: Tensor) -> Tensor:
        return update_loss(config, logprobs, everything).loss_sum

    if isinstance(config, CISPOConfig):  # its loss is not a function whose derivative is its gradient
        logprobs = new.clone().requires_grad_()
        loss(logprobs).backward()
        ratio = torch.exp(new - old).clamp(0.0, 5.0)
        wanted = torch.where(arguments["response_mask"], -ratio * update.advantages, 0.0)
        torch.testing.assert_close(logprobs.grad, wanted)
        return
    assert torch.autograd.gradcheck(loss, (new.clone().requires_grad_(),), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_any_cut_into_micro_batches_gives_the_same_gradient(config: AlgorithmConfig) -> None:
    _, arguments, old, new, sampled = problem(4)
    update = prepared(config, arguments, old, sampled)

    def run(parts: list[list[int]]) -> tuple[Tensor, Tensor, dict[str, float]]:
        logprobs = new.clone().requires_grad_()
        loss, weight, statistics = torch.zeros(()), torch.zeros(()), {}
        for rows in parts:
            width = int(arguments["response_mask"][rows].sum(1).max()) if rows else 0
            terms = update_loss(config, logprobs[rows, :width], update.select(rows, width))
            loss, weight = loss + terms.loss_sum, weight + terms.weight
            for name, value in terms.statistics.items():
                total, count = statistics.get(name, (0.0, 0.0))
                statistics[name] = (total + float(value.total), count + float(value.count))
        (loss / weight).backward()
        assert logprobs.grad is not None
        return loss / weight, logprobs.grad, {n: t / c for n, (t, c) in statistics.items()}

    whole = run([list(range(len(old)))])
    order = torch.randperm(len(old), generator=torch.Generator().manual_seed(0)).tolist()
    cut = run([order[:3], [], order[3:4], order[4:]])
    for left, right in zip(whole[:2], cut[:2], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    assert whole[2] == pytest.approx(cut[2], rel=1e-9)
    assert whole[0].item() != 0


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_an_empty_micro_batch_still_runs_backward(config: AlgorithmConfig) -> None:
    for shape in ((0, 3), (2, 0), (2, 3)):
        logprobs = torch.full(shape, math.nan).requires_grad_()
        masks = torch.zeros(shape, dtype=torch.bool)
        batch = UpdateBatch(
            old_logprobs=torch.zeros(shape),
            advantages=torch.zeros(shape),
            response_mask=masks,
            row_weights=torch.zeros(shape[0]),
            token_selection=masks,
            denominator=torch.zeros(()),
            statistics={},
        )
        terms = update_loss(config, logprobs, batch)
        terms.loss_sum.backward()
        assert terms.loss_sum.item() == 0
        assert float(terms.weight) == 0
        assert logprobs.grad is not None
        assert not logprobs.grad.any()


def single(config: AlgorithmConfig, ratio: float, advantage: float) -> LossTerms:
    logprobs = torch.tensor([[math.log(ratio) - 1.0, math.nan]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[True, False]])
    return policy_loss(
        config,
        logprobs=logprobs,
        old_logprobs=torch.full((1, 2), -1.0, dtype=torch.float64),
        advantages=torch.tensor([[advantage, 0.0]]),
        response_mask=mask,
    )


@pytest.mark.parametrize(
    ("config", "ratio", "advantage", "wanted"),
    [
        (DAPOConfig(), 1.5, 1.0, -1.28),
        (DAPOConfig(), 1.5, -1.0, 1.5),
        (DAPOConfig(), 0.5, -1.0, 0.8),
        (DAPOConfig(dual_clip=3.0), 9.0, -1.0, 3.0),
        (DAPOConfig(dual_clip=3.0), 2.0, -1.0, 2.0),
        (GRPOConfig(), 1.5, 1.0, -1.2),
        (GSPOConfig(), 1.5, 1.0, -1.0004),
        (GRPOSConfig(dual_clip=3.0), 9.0, -1.0, 3.0),
    ],
)
def test_clipping(config: AlgorithmConfig, ratio: float, advantage: float, wanted: float) -> None:
    assert single(config, ratio, advantage).loss_sum.item() == pytest.approx(wanted)


def test_statistics_say_where_the_clip_acts() -> None:
    high = single(DAPOConfig(), 1.5, 1.0).statistics
    low = single(DAPOConfig(), 0.5, -1.0).statistics
    inside = single(DAPOConfig(), 1.5, -1.0).statistics  # the minimum takes the unclipped branch
    assert [float(s["policy/clip_frac_high"].total) for s in (high, low, inside)] == [1, 0, 0]
    assert [float(s["policy/clip_frac_low"].total) for s in (high, low, inside)] == [0, 1, 0]
    assert [float(s["policy/clip_frac"].count) for s in (high, low, inside)] == [1, 1, 1]
    assert float(high["policy/ratio_mean"].total) == pytest.approx(1.5)
    assert float(high["policy/kl_old_nats"].total) == pytest.approx(0.5 - math.log(1.5))


def test_an_absurd_ratio_stays_finite() -> None:
    terms = single(DAPOConfig(), math.exp(200.0), -1.0)
    assert math.isfinite(terms.loss_sum.item())


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GTPOConfig(loss_denominator="group"), {}, "group_ids: got None"),
        (GTPOConfig(loss_denominator="group"), {"group_ids": torch.zeros(2)}, "group_ids: got torch.float32"),
        (
            GTPOConfig(loss_denominator="group"),
            {"group_ids": torch.zeros(3, dtype=torch.int64)},
            r"group_ids: got shape",
        ),
        (TopEntropyConfig(), {}, "token_selection: TopEntropyConfig needs it of the whole batch"),
        (KLCovConfig(), {}, "token_selection: KLCovConfig needs it of the whole batch; call prepare_update"),
        (DPPOConfig(), {}, "rollout_logprobs: DPPOConfig needs it"),
        (GRPOConfig(off_policy=OffPolicyConfig(mode="mask", lower=0.9, upper=1.1)), {}, "rollout_logprobs: GRPOConfig"),
        (GTPOConfig(reference_kl=ReferenceKLConfig(coef=0.1)), {}, "ref_logprobs: GTPOConfig needs it"),
        (GTPOConfig(), {"logprobs": torch.zeros(2, 3, dtype=torch.bfloat16)}, "logprobs: got torch.bfloat16"),
        (GTPOConfig(), {"old_logprobs": torch.zeros(2, 2)}, r"old_logprobs: got shape \(2, 2\)"),
        (GTPOConfig(), {"response_mask": torch.ones(2, 3)}, "response_mask: got torch.float32"),
    ],
)
def test_bad_input(config: AlgorithmConfig, changes: dict, message: str) -> None:
    arguments = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ShapeError, match=message):
        policy_loss(config, **{**arguments, **changes})


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_are_named(name: str, value: float) -> None:
    _, arguments, old, new, _ = problem(5)
    given = {"logprobs": new, "old_logprobs": old, "advantages": torch.ones_like(old)}
    mask = arguments["response_mask"]
    row = int(torch.nonzero(mask[:, 1])[0])
    given[name] = given[name].clone()
    given[name][~mask] = math.nan  # nobody looks there
    policy_loss(GTPOConfig(), **given, response_mask=mask)
    given[name][row, 1] = value
    with pytest.raises(DataError, match=rf"^{name}\[{row}, 1\] = {value}: expected a finite value"):
        policy_loss(GTPOConfig(), **given, response_mask=mask)


def test_a_name_is_no_configuration() -> None:
    given = {name: torch.zeros(2, 3) for name in ("logprobs", "old_logprobs", "advantages")}
    with pytest.raises(ConfigError, match="config: got str"):
        policy_loss("gtpo", **given, response_mask=torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("foreign", [math.nan, 7.0])
def test_foreign_tokens_anywhere_change_no_loss(config: AlgorithmConfig, foreign: float) -> None:
    """Tool output between the policy's own tokens, whose log-probs stay as they are.

    A token's loss is computed by itself, so its gradient keeps every bit. What is added over the padded matrix (the
    ratio of a response, the loss) is added in another order.
    """
    for seed in range(3):
        own = problem(seed)[1]["response_mask"]
        whole, gradient = loss_of_scattered(config, seed, own, foreign)
        mask = with_holes(own, 6, torch.Generator().manual_seed(seed))
        holed, found = loss_of_scattered(config, seed, mask, foreign)
        if algorithm_of(config).ratio_of == "token":
            assert torch.equal(found, gradient)
        else:
            torch.testing.assert_close(found, gradient, rtol=1e-13, atol=0)
        assert torch.equal(holed.weight, whole.weight)
        torch.testing.assert_close(holed.loss_sum, whole.loss_sum, rtol=1e-12, atol=1e-13)
        assert set(holed.statistics) == set(whole.statistics)
        for name, value in whole.statistics.items():
            assert float(holed.statistics[name].total) == pytest.approx(float(value.total), rel=1e-12, abs=1e-13)
            assert torch.equal(holed.statistics[name].count, value.count)


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("foreign", [math.nan, 1e30, -math.inf])
def test_a_row_that_is_masked_out_is_in_neither_numerator_nor_denominator(
    config: AlgorithmConfig, foreign: float
) -> None:
    """A response that was cut, or has no verdict: the loss is that of a batch without it."""
    _, arguments, old, new, sampled = problem(5)
    row = int(arguments["response_mask"].sum(1).argmax())
    kept = torch.arange(len(old)) != row

    def loss_of(arguments: dict[str, Tensor], *matrices: Tensor) -> tuple[LossTerms, Tensor]:
        old, new, sampled = matrices
        logprobs = new.clone().requires_grad_()
        terms = update_loss(config, logprobs, prepared(config, arguments, old, sampled).select(range(len(old))))
        terms.loss_sum.backward()
        assert logprobs.grad is not None
        return terms, logprobs.grad

    without, wanted = loss_of(
        {name: tensor[kept] for name, tensor in arguments.items()}, old[kept], new[kept], sampled[kept]
    )
    for name in ("token_entropy", "response_mask"):
        arguments[name] = arguments[name].clone()
        arguments[name][row] = 0 if name == "response_mask" else foreign
    for matrix in (old, new, sampled):
        matrix[row] = foreign
    found, gradient = loss_of(arguments, old, new, sampled)
    torch.testing.assert_close(found.weight, without.weight, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.loss_sum, without.loss_sum, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient[kept], wanted, rtol=1e-12, atol=0)
    assert not gradient[row].any()


def loss_of_scattered(config: AlgorithmConfig, seed: int, mask: Tensor, foreign: float) -> tuple[LossTerms, Tensor]:
    """Loss, and the gradient of every token, of a problem whose tokens stand where ``mask`` has them."""
    _, arguments, old, new, sampled = problem(seed)
    own = arguments["response_mask"]

    def move(matrix: Tensor) -> Tensor:
        return moved(matrix, own, mask, foreign)

    spread = {**arguments, "response_mask": mask, "token_entropy": move(arguments["token_entropy"])}
    update = prepared(config, spread, move(old), move(sampled))
    logprobs = move(new).requires_grad_()
    terms = update_loss(config, logprobs, update.select(range(len(old))))
    terms.loss_sum.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[~mask].any()
    return terms, logprobs.grad[mask]


@pytest.mark.parametrize("config", ALL, ids=IDS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_bad_current_logprob_makes_loss_and_gradient_nan_instead_of_waiting_for_a_gpu(
    config: AlgorithmConfig, value: float
) -> None:
    """The gradient is what the update is skipped by: a ratio that is clamped would hand back a 0."""
    _, arguments, old, new, sampled = problem(5)
    update = prepared(config, arguments, old, sampled)
    logprobs = new.clone()
    row = int(torch.nonzero(arguments["response_mask"][:, 0])[0])
    logprobs[row, 0] = value
    logprobs.requires_grad_()
    terms = update_loss(config, logprobs, update.select(range(len(old))))
    terms.loss_sum.backward()
    assert terms.loss_sum.isnan()
    assert logprobs.grad is not None
    assert logprobs.grad[row, 0].isnan()


def test_credit_is_a_constant_of_the_loss() -> None:
    _, arguments, old, new, _ = problem(5)
    credit = assign_credit(GTPOConfig(), **arguments)
    leaking = credit.advantages.clone().requires_grad_()
    rest = {name: value for name, value in arguments.items() if name != "rewards"}
    update = prepare_update(GTPOConfig(), advantages=leaking, old_logprobs=old.requires_grad_(), **rest)
    logprobs = new.clone().requires_grad_()
    update_loss(GTPOConfig(), logprobs, update.select(range(len(old)))).loss_sum.backward()
    assert leaking.grad is None
    assert old.grad is None
    assert logprobs.grad is not None
