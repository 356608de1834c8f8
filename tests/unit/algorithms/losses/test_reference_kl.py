"""The divergence from a reference policy in the loss: scalar loops, exact expectations, every algorithm."""

import dataclasses
import math

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit, prepare_update, update_loss
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.reference_kl import kl_estimate, kl_penalty
from gtpo_megatron.algorithms.registry import BUILT_IN, algorithm_of
from gtpo_megatron.config.algorithm import GRPOConfig, GSPOConfig, ReferenceKLConfig
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
from tests.reference import reference_kl as reference
from tests.strategies import random_batch

FORMS = [(kind, gradient) for kind in ("k1", "k2", "k3") for gradient in ("estimator", "unbiased")]


def inputs_of(new, old, ref, mask=None):
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else mask
    return LossInputs(
        logprobs=torch.where(mask, new, 0.0),
        old_logprobs=torch.where(mask, old, 0.0),
        log_ratios=torch.where(mask, new - old, 0.0),
        advantages=torch.zeros_like(new),
        mask=mask,
        ref_logprobs=torch.where(mask, ref, 0.0),
    )


@pytest.mark.parametrize(("kind", "gradient"), FORMS)
def test_value_and_gradient_of_every_token(kind, gradient):
    generator = torch.Generator().manual_seed(1)
    new, old, ref = -3 * torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    config = ReferenceKLConfig(coef=1.0, estimator=kind, gradient=gradient)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 3:] = mask[2] = False
    penalty = kl_penalty(config, inputs_of(new, old, ref, mask))
    penalty.sum().backward()
    penalty, leaf = penalty.detach(), new.detach()
    for row in range(4):
        for column in range(5):
            wanted = (0.0, 0.0)
            if mask[row, column]:
                wanted = reference.penalty(kind, gradient, *(float(x[row, column]) for x in (leaf, old, ref)))
            assert float(penalty[row, column]) == pytest.approx(wanted[0], rel=1e-12, abs=1e-15)
            assert float(new.grad[row, column]) == pytest.approx(wanted[1], rel=1e-12, abs=1e-15)


def test_values_by_hand():
    difference = torch.tensor(math.log(2.0), dtype=torch.float64)  # twice as likely as under the reference
    found = [float(kl_estimate(difference, kind)) for kind in ("k1", "k2", "k3")]
    assert found == pytest.approx([0.693147180559945, 0.240226506959101, 0.193147180559945], rel=1e-14)


def policies(temperature):
    generator = torch.Generator().manual_seed(7)
    logits, ref = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    old = logits + temperature * torch.randn(6, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


def expected_gradient(kind, gradient, *, drift):
    """Of the mean penalty over all outcomes of the old policy, by the current policy's logits."""
    logits, old, ref = policies(drift)
    new = logits.log_softmax(0)
    config = ReferenceKLConfig(coef=1.0, estimator=kind, gradient=gradient)
    penalty = kl_penalty(config, inputs_of(new[None], old[None], ref[None]))[0]
    (found,) = torch.autograd.grad((old.exp() * penalty).sum(), logits)
    return found


def divergence_gradient(*, forward=False, drift):
    logits, _, ref = policies(drift)
    new = logits.log_softmax(0)
    divergence = (ref.exp() * (ref - new)).sum() if forward else (new.exp() * (new - ref)).sum()
    return torch.autograd.grad(divergence, logits)[0]


@pytest.mark.parametrize("drift", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_unbiased_form_has_the_gradient_of_the_divergence(kind, drift):
    """On policy, and from tokens of an older one."""
    torch.testing.assert_close(expected_gradient(kind, "unbiased", drift=drift), divergence_gradient(drift=drift))


def test_what_the_other_gradients_are_on_policy():
    wanted = {
        "k1": torch.zeros(6, dtype=torch.float64),
        "k2": divergence_gradient(drift=0.0),
        "k3": divergence_gradient(forward=True, drift=0.0),
    }
    for kind, gradient in wanted.items():
        torch.testing.assert_close(expected_gradient(kind, "estimator", drift=0.0), gradient)


def test_in_the_first_update_the_unbiased_form_has_the_gradient_of_k2():
    new, ref = -torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for config in (
        ReferenceKLConfig(coef=1.0, estimator="k3", gradient="unbiased"),
        ReferenceKLConfig(coef=1.0, estimator="k2"),
    ):
        leaf = new.clone().requires_grad_()
        kl_penalty(config, inputs_of(leaf, new, ref)).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-14, atol=0)


def test_log_probs_far_apart_stay_finite():
    new = torch.tensor([[-60.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, -60.0]], dtype=torch.float64)
    for kind, gradient in FORMS:
        config = ReferenceKLConfig(coef=1.0, estimator=kind, gradient=gradient)
        penalty = kl_penalty(config, inputs_of(new, new.detach(), ref))
        assert torch.isfinite(penalty).all()
        assert torch.isfinite(torch.autograd.grad(penalty.sum(), new)[0]).all()


def batch_of(config):
    """Two updates' worth of log-probs, so that no ratio is 1."""
    batch = random_batch(5, num_groups=3, group_size=4, max_tokens=6)
    arguments = batch.arguments()
    mask = arguments["response_mask"]
    generator = torch.Generator().manual_seed(9)
    old, ref = (torch.where(mask, -2 * torch.rand(mask.shape, generator=generator), 0.0) for _ in range(2))
    new = torch.where(mask, old - 0.1 * torch.rand(mask.shape, generator=generator), 0.0)
    credit = assign_credit(config, **{**arguments, "old_logprobs": old, "teacher_logprobs": ref})
    update = prepare_update(
        config,
        advantages=credit.advantages,
        token_entropy=arguments["token_entropy"],
        response_mask=mask,
        group_ids=arguments["group_ids"],
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=ref,
    )
    return update, new, old, ref, mask


def loss_of(config, update, new):
    logprobs = new.clone().requires_grad_()
    terms = update_loss(config, logprobs, update)
    (terms.loss_sum / terms.weight).backward()
    return float((terms.loss_sum / terms.weight).detach()), logprobs.grad


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("record", BUILT_IN, ids=lambda record: record.config.__name__)
def test_every_algorithm_adds_it_under_its_own_denominator(record, kind):
    """Against the scalar loop: per token, and the token mean of each response where a response has one loss."""
    plain = record.config()
    penalised = dataclasses.replace(plain, reference_kl=ReferenceKLConfig(coef=0.3, estimator=kind))
    update, new, old, ref, mask = batch_of(penalised)
    without, gradient = loss_of(plain, update, new)
    found, found_gradient = loss_of(penalised, update, new)
    per_response = algorithm_of(plain).ratio_of == "response"
    total, slopes = 0.0, torch.zeros_like(new)
    for row in range(len(new)):
        length = int(mask[row].sum())
        share = float(update.row_weights[row]) / (length if per_response and length else 1)
        for column in torch.nonzero(mask[row]).flatten().tolist():
            value, slope = reference.penalty(kind, "estimator", *(float(x[row, column]) for x in (new, old, ref)))
            total += 0.3 * share * value
            slopes[row, column] = 0.3 * share * slope
    weight = float(update.denominator)
    assert found - without == pytest.approx(total / weight, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found_gradient - gradient, slopes / weight, rtol=1e-4, atol=1e-6)


def test_a_correction_for_the_sampler_weighs_it_too():
    """Tokens come from the sampler: a token that does not count in the objective does not count in its penalty."""
    config = GRPOConfig(reference_kl=ReferenceKLConfig(coef=1.0))
    update, new, _, _, mask = batch_of(config)
    weights = torch.where(mask, 0.5, 1.0)
    _, whole = loss_of(config, update, new)
    _, half = loss_of(config, dataclasses.replace(update, token_weights=weights), new)
    torch.testing.assert_close(half, whole / 2)


def test_missing_or_bad_log_probs_are_one_line():
    config = GSPOConfig(reference_kl=ReferenceKLConfig(coef=0.1))
    update, *_ = batch_of(config)
    mask = update.response_mask
    arguments = {
        "advantages": torch.zeros(mask.shape),
        "token_entropy": torch.zeros(mask.shape),
        "response_mask": mask,
        "group_ids": torch.zeros(len(mask), dtype=torch.int64),
        "old_logprobs": update.old_logprobs,
    }
    for ref, error, message in (
        (None, ShapeError, "got None, needed for reference_kl.coef=0.1"),
        (torch.zeros(1, 1), ShapeError, "ref_logprobs"),
        (torch.where(mask, 0.5, 0.0), DataError, r"ref_logprobs\[.*\] = 0.5"),
        (torch.where(mask, torch.nan, 0.0), DataError, r"ref_logprobs\[.*\] = nan"),
    ):
        with pytest.raises(error, match=message):
            prepare_update(config, ref_logprobs=ref, **arguments)


def test_bad_configurations_are_one_line():
    for changes, message in (
        ({"coef": -0.1}, "coef=-0.1"),
        ({"estimator": "k4"}, "estimator='k4': must be one of 'k1', 'k2', 'k3'"),
        ({"place": "advantage"}, "place='advantage': must be one of 'loss', 'reward'"),
        ({"place": "reward", "gradient": "unbiased"}, "nothing flows back through a reward"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            ReferenceKLConfig(**changes)
        assert "\n" not in str(error.value)
