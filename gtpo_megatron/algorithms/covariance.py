"""Covariance between log-prob and advantage, token by token, and the losses that act on its tail (arXiv 2505.22617)."""

from torch import Tensor


def token_covariance(logprobs: Tensor, advantages: Tensor, mean_logprob: float, mean_advantage: float) -> Tensor:
    """``(log pi - mean(log pi)) (A - mean(A))`` (arXiv 2505.22617, Eq. 10).

    Args:
        logprobs: ``[B, T]`` nats.
        advantages: ``[B, T]``.
        mean_logprob: over all tokens of the batch.
        mean_advantage: likewise.

    Returns:
        ``[B, T]``.
    """
    return (logprobs - mean_logprob) * (advantages - mean_advantage)


def kl_cov_loss(ratio: Tensor, log_ratios: Tensor, advantages: Tensor, selected: Tensor, *, kl_coef: float) -> Tensor:
    """``-w A``, plus ``kl_coef |log w|`` on the selected tokens (arXiv 2505.22617, Eq. 13, as its authors coded it).

    Args:
        ratio: ``[B, T]``.
        log_ratios: ``[B, T]``; the derivative of ``|.|`` at 0 is 0, so nothing is penalised in the first update.
        advantages: ``[B, T]``.
        selected: ``[B, T]`` bool.
        kl_coef: strength.

    Returns:
        ``[B, T]``, the loss of each token.
    """
    return -ratio * advantages + kl_coef * log_ratios.abs() * selected.to(ratio.dtype)
