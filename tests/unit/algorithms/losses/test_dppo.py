"""DPPO against scalar code, by hand, at probabilities of 0 and 1; which runs it refuses."""

import dataclasses
import math

import pytest
import torch

from gtpo_megatron.algorithms import LossTerms, UpdateBatch, policy_loss, update_loss
from gtpo_megatron.algorithms.losses.dppo import binary_kl, binary_tv
from gtpo_megatron.config.algorithm import DPPOConfig, OffPolicyConfig
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from recipes import tiny_cpu
from tests.reference import dppo as reference
from tests.unit.algorithms.rival_checks import Problem, check_invariances, lists

CONFIGS = [DPPOConfig(norm_tokens=10), DPPOConfig(norm_tokens=10, divergence="kl")]
IDS = ["tv", "kl"]


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def one_token(config: DPPOConfig, mu: float, pi: float, advantage: float) -> tuple[LossTerms, float]:
    """The terms, and the gradient by ``log pi``; the trainer's old policy is far from both."""
    logprobs = logs(pi).requires_grad_()
    batch = UpdateBatch(
        old_logprobs=logs(1e-6),
        advantages=torch.tensor([[advantage]]),
        response_mask=torch.tensor([[True]]),
        row_weights=torch.ones(1),
        rollout_logprobs=logs(mu),
        denominator=torch.ones(()),
        statistics={},
    )
    terms = update_loss(config, logprobs, batch)
    terms.loss_sum.backward()
    assert logprobs.grad is not None
    return terms, logprobs.grad.item()


@pytest.mark.parametrize(
    ("mu", "pi", "tv", "kl", "blocked"),
    [
        (1e-4, 1e-2, 0.0099, 0.009489, set()),
        (0.99, 0.80, 0.19, 0.181005, {("tv", -1.0), ("kl", -1.0)}),
        (0.5, 0.7, 0.20, 0.087177, {("tv", 1.0), ("kl", 1.0)}),
        (0.2, 0.3, 0.10, 0.025732, set()),
    ],
)
def test_by_hand(mu: float, pi: float, tv: float, kl: float, blocked: set) -> None:
    assert binary_tv(logs(pi), logs(mu)).item() == pytest.approx(tv)
    assert binary_kl(logs(pi), logs(mu)).item() == pytest.approx(kl, abs=1e-6)
    for config, advantage in ((config, advantage) for config in CONFIGS for advantage in (1.0, -1.0)):
        terms, gradient = one_token(config, mu, pi, advantage)
        is_blocked = (config.divergence, advantage) in blocked
        assert gradient == pytest.approx(0.0 if is_blocked else -advantage * pi / mu)
        assert float(terms.statistics["policy/clip_frac"].total) == is_blocked
        side = "high" if advantage > 0 else "low"
        assert float(terms.statistics[f"policy/clip_frac_{side}"].total) == is_blocked
        assert float(terms.statistics["policy/ratio_mean"].total) == pytest.approx(pi / mu)
        assert float(terms.weight) == 10


def test_certain_tokens() -> None:
    assert binary_kl(logs(1.0, 1.0, 0.5), logs(1.0, 0.5, 1.0))[0].tolist() == pytest.approx(
        [0.0, math.inf, math.log(2)]
    )
    over = torch.tensor([[1e-7]], dtype=torch.float64)  # rounding leaves a log-prob a little above 0
    assert binary_kl(over, logs(1.0)).isfinite().all()
    assert one_token(CONFIGS[1], 0.5, 1.0, 1.0)[1] == 0.0
    assert one_token(CONFIGS[1], 0.5, 1.0, -1.0)[1] == pytest.approx(2.0)


def test_a_large_ratio_is_truncated() -> None:
    assert one_token(DPPOConfig(max_ratio=20.0), 1e-4, 1e-2, 1.0)[1] == pytest.approx(-20.0)
    assert one_token(DPPOConfig(), 1e-4, 1e-2, 1.0)[1] == pytest.approx(-100.0)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_equals_the_scalar_code(config: DPPOConfig, seed: int) -> None:
    problem = Problem(seed)
    got = problem.run(config)
    new, sampled = (lists(problem.tensors[name], problem.batch) for name in ("new", "sampled"))
    delta = config.max_tv if config.divergence == "tv" else config.max_kl
    wanted = reference.gradient(
        new, sampled, lists(got["advantages"], problem.batch), kind=config.divergence, delta=delta
    )
    num_live = sum(map(bool, problem.batch.entropies))
    for row, other in zip(lists(got["gradient"], problem.batch), wanted, strict=True):
        assert row == pytest.approx([-value / (10 * num_live) for value in other], rel=1e-9, abs=1e-15)


def test_advantages_are_centred_only() -> None:
    problem = Problem(1)
    rewards, groups = problem.rewards, problem.groups
    live = torch.tensor([bool(row) for row in problem.batch.entropies])
    got = problem.run(DPPOConfig())["advantages"]
    for row in torch.nonzero(live).flatten():
        mean = rewards[live & (groups == groups[row])].mean()
        assert got[row, 0].item() == pytest.approx((rewards[row] - mean).item(), abs=1e-6)


def test_the_samplers_logprobs_are_needed_and_no_correction_besides() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ShapeError, match="rollout_logprobs: DPPOConfig needs it"):
        policy_loss(DPPOConfig(), logprobs=-ones, old_logprobs=-ones, advantages=ones, response_mask=ones.bool())
    problem = Problem(1)
    problem.tensors["sampled"] = problem.tensors["sampled"] + 9
    with pytest.raises(DataError, match="rollout_logprobs"):
        problem.run(DPPOConfig())
    with pytest.raises(ConfigError, match="off_policy.mode='truncate' with DPPOConfig"):
        DPPOConfig(off_policy=OffPolicyConfig(mode="truncate"))
    for fields in ({"divergence": "js"}, {"max_tv": -1.0}, {"max_kl": -1.0}, {"max_ratio": 0.0}, {"norm_tokens": 0}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            DPPOConfig(**fields)


def test_responses_of_older_weights_need_no_correction_besides() -> None:
    run = tiny_cpu.gtpo()
    stale = dataclasses.replace(run.rollout, max_staleness=1)
    with pytest.raises(ConfigError, match=r"rollout.max_staleness=1 with algorithm.off_policy.mode='off'"):
        dataclasses.replace(run, rollout=stale)
    assert dataclasses.replace(run, algorithm=DPPOConfig(), rollout=stale).rollout == stale


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_order_cuts_and_foreign_tokens_change_nothing(config: DPPOConfig) -> None:
    check_invariances(config)
