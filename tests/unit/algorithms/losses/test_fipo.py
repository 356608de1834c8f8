"""FIPO against loops and by hand; which runs it refuses."""

import dataclasses

import pytest
import torch
from torch import Tensor

from gtpo_megatron.algorithms import policy_loss
from gtpo_megatron.algorithms.losses.fipo import discounted_future, influence
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import DAPOConfig, FIPOConfig
from gtpo_megatron.config.algorithm.base import NoLengthPenalty
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu
from tests.reference import fipo as reference
from tests.unit.algorithms.rival_checks import Problem, check_invariances, lists

WIDE = FIPOConfig(influence_eps_low=0.2, half_life_tokens=2.0, dual_clip=1.4, safety_ratio=1.2)


def inputs_of(log_ratios: list[float], advantage: float, mask: list[bool] | None = None) -> LossInputs:
    row = torch.tensor([log_ratios], dtype=torch.float64)
    return LossInputs(
        logprobs=row - 3,
        old_logprobs=torch.full_like(row, -3.0),
        log_ratios=row,
        advantages=torch.full_like(row, advantage),
        mask=torch.ones_like(row, dtype=torch.bool) if mask is None else torch.tensor([mask]),
    )


def weights(config: FIPOConfig, log_ratios: list[float], advantage: float) -> list[float]:
    return influence(config, inputs_of(log_ratios, advantage))[0].tolist()


def test_by_hand() -> None:
    assert weights(FIPOConfig(), [0.1, -0.3, 0.2], 1.0) == pytest.approx([1.0, 1.0, 1.2])
    assert weights(FIPOConfig(influence_eps_low=0.2), [0.1, -0.3, 0.2], 1.0) == pytest.approx(
        [0.99795, 0.90097, 1.2], abs=1e-5
    )


def test_unsafe_tokens() -> None:
    config = FIPOConfig(half_life_tokens=1e9, influence_eps_low=0.9, influence_eps_high=9.0, safety_ratio=1.5)
    assert weights(config, [0.5, 0.1], -1.0) == pytest.approx([1.0, 1.10517], abs=1e-5)  # its ratio is above 1.5
    assert weights(config, [0.5, 0.1], 1.0) == pytest.approx([1.82212, 1.10517], abs=1e-5)
    beyond = dataclasses.replace(config, dual_clip=1.2)  # exp(0.5) is above: not a part of anybody's future
    assert weights(beyond, [0.1, 0.5, 0.1], -1.0) == pytest.approx([1.2214, 1.0, 1.10517], abs=1e-4)
    assert weights(beyond, [0.1, 0.5, 0.1], 1.0)[0] == pytest.approx(2.01375, abs=1e-5)
    endless = dataclasses.replace(config, dual_clip=None)
    assert weights(endless, [0.1, 3.0], -1.0)[0] == 10.0


@pytest.mark.parametrize("config", [FIPOConfig(), WIDE], ids=["defaults", "wide"])
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_equals_the_loops(config: FIPOConfig, seed: int) -> None:
    problem = Problem(seed)
    got = problem.run(config if config is WIDE else dataclasses.replace(config, length_penalty=NoLengthPenalty()))
    rows = (lists(tensor, problem.batch) for tensor in (problem.tensors["new"], problem.tensors["old"]))
    wanted = reference.objective(
        *rows,
        lists(got["advantages"], problem.batch),
        eps_low=0.2,
        eps_high=0.28,
        c=config.dual_clip,
        tau=config.half_life_tokens,
        low=config.influence_eps_low,
        high=0.2,
        safety=config.safety_ratio,
    )
    assert got["loss"].item() == pytest.approx(-wanted, rel=1e-6)


def test_the_weight_is_a_constant() -> None:
    """The gradient is that of the surrogate with a fixed ``f A``."""
    inputs = inputs_of([0.1, -0.1, 0.2], 1.0)

    def loss(logprobs: Tensor, config: object, advantages: Tensor) -> Tensor:
        terms = policy_loss(
            config,
            logprobs=logprobs,
            old_logprobs=inputs.old_logprobs,
            advantages=advantages,
            response_mask=inputs.mask,
        )
        (gradient,) = torch.autograd.grad(terms.loss_sum, logprobs)
        return gradient

    weighed = inputs.advantages * influence(WIDE, inputs)
    logprobs = inputs.logprobs.clone().requires_grad_()
    plain = DAPOConfig(dual_clip=WIDE.dual_clip)
    torch.testing.assert_close(loss(logprobs, WIDE, inputs.advantages), loss(logprobs, plain, weighed))


def test_foreign_tokens_are_no_distance() -> None:
    values = torch.tensor([[1.0, 99.0, 2.0, 99.0, 4.0]])
    mask = torch.tensor([[True, False, True, False, True]])
    assert discounted_future(values, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 0.0, 4.0]]
    assert discounted_future(values[:, :0], mask[:, :0], 0.5).shape == (1, 0)
    assert not discounted_future(values, torch.zeros_like(mask), 0.5).any()


def test_a_long_response_is_summed_to_its_end() -> None:
    values = torch.ones(1, 3000, dtype=torch.float64)
    got = discounted_future(values, values.bool(), 0.999)[0]
    wanted = (1 - 0.999 ** torch.arange(3000, 0, -1, dtype=torch.float64)) / (1 - 0.999)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


def test_before_the_first_update_it_is_dapo() -> None:
    problem = Problem(1)
    problem.tensors["new"] = problem.tensors["old"]
    ours = problem.run(dataclasses.replace(FIPOConfig(), length_penalty=NoLengthPenalty()))
    dapo = problem.run(DAPOConfig(length_penalty=NoLengthPenalty()))
    assert torch.equal(ours["gradient"], dapo["gradient"])


def test_the_mean_weight_is_reported() -> None:
    inputs = inputs_of([0.1, -0.3, 0.2], 1.0)
    terms = policy_loss(
        FIPOConfig(),
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        response_mask=inputs.mask,
    )
    statistic = terms.statistics["policy/influence_mean"]
    assert float(statistic.total / statistic.count) == pytest.approx(3.2 / 3)


@pytest.mark.parametrize("fields", [{"half_life_tokens": 0.0}, {"influence_eps_low": 1.5}, {"safety_ratio": -1.0}])
def test_refused_values(fields: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        FIPOConfig(**fields)


def test_a_run_with_one_update_is_refused() -> None:
    run = tiny_cpu.gtpo()
    algorithm = FIPOConfig(length_penalty=NoLengthPenalty())
    for size in (0, 1):
        update = dataclasses.replace(run.update, updates_per_rollout=1, mini_batch_prompts=size)
        with pytest.raises(ConfigError, match=r"FIPOConfig: .* set --update.updates-per-rollout 2"):
            dataclasses.replace(run, algorithm=algorithm, update=update)
    update = dataclasses.replace(run.update, updates_per_rollout=2)
    assert dataclasses.replace(run, algorithm=algorithm, update=update).algorithm == algorithm


def test_order_cuts_and_foreign_tokens_change_nothing() -> None:
    check_invariances(dataclasses.replace(FIPOConfig(), length_penalty=NoLengthPenalty()))
    check_invariances(dataclasses.replace(WIDE, length_penalty=NoLengthPenalty()))
