"""KL divergence of the policy from a reference policy, estimated from sampled tokens, and its term in the loss.

The estimators are Schulman's (joschu.net/blog/kl-approx.html); ``k3`` is arXiv 2402.03300, Eq. 4. Which gradient is
whose: arXiv 2512.21852 and 2512.02556, Eq. 7.
"""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, log_ratio
from gtpo_megatron.config.algorithm import KLEstimator, ReferenceKLConfig


def kl_estimate(differences: Tensor, estimator: KLEstimator) -> Tensor:
    """``k1 = d``, ``k2 = d^2 / 2`` or ``k3 = exp(-d) - 1 + d``, elementwise; gradient flows.

    Args:
        differences: ``d = log pi - log pi_ref`` of tokens sampled from ``pi``, nats, any shape.
        estimator: name of the estimator.
    """
    match estimator:
        case "k1":
            return differences
        case "k2":
            return differences.square() / 2
        case "k3":
            return torch.expm1(-differences) + differences


def kl_penalty(config: ReferenceKLConfig, inputs: LossInputs) -> Tensor:
    """The penalty of every token without its coefficient, ``[B, T]``; 0 outside the mask.

    ``gradient="estimator"``: ``k(d)``. ``"unbiased"``: the value ``w k(d)`` with the gradient ``w d dlog pi``, ``w``
    being ``pi / pi_old``. On tokens of ``pi_old`` its mean is the gradient of ``KL(pi || pi_ref)``, whichever estimator
    gives the value: ``w k3`` has it as it stands, ``w k1`` has ``w dlog pi`` besides, of mean 0.

    Args:
        config: estimator and gradient.
        inputs: some rows with the reference's log-probs. Differences are bounded as ratios are.
    """
    assert inputs.ref_logprobs is not None
    differences = log_ratio(inputs.logprobs, inputs.ref_logprobs, inputs.mask)
    if config.gradient == "estimator":
        return kl_estimate(differences, config.estimator)
    weight, constant = inputs.ratio.detach(), differences.detach()
    moves = inputs.logprobs - inputs.logprobs.detach()  # 0, with the gradient of log pi
    return weight * (kl_estimate(constant, config.estimator) + constant * moves)


def with_reference_kl(config: ReferenceKLConfig, losses: Tensor, inputs: LossInputs, *, per_response: bool) -> Tensor:
    """``losses + coef * penalty`` (arXiv 2402.03300, Eq. 3); of a loss of responses, the mean over each one's tokens.

    Args:
        config: coefficient, estimator and gradient.
        losses: ``[B, T]``, or ``[B]`` if ``per_response``.
        inputs: the rows that ``losses`` are of.
        per_response: one loss per response.
    """
    penalty = kl_penalty(config, inputs)
    if per_response:
        penalty = penalty.sum(1) / inputs.mask.sum(1).clamp(min=1)
    return losses + config.coef * penalty
