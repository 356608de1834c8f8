"""The divergence from a reference policy as a part of the reward."""

from torch import Tensor

from gtpo_megatron.algorithms.checks import check_full_precision, check_shape, flatten_logprobs
from gtpo_megatron.algorithms.losses.loss_batch import LOG_RATIO_LIMIT
from gtpo_megatron.algorithms.losses.reference_kl import kl_estimate
from gtpo_megatron.algorithms.sums import Reduction, exact_sum, significant
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm import ReferenceKLConfig
from gtpo_megatron.errors import ShapeError


def check_reference(config: ReferenceKLConfig, ref_logprobs: Tensor | None, response_mask: Tensor) -> Tensor:
    """Checks the reference policy's log-probs; returns those of the tokens, ``[N]`` float64.

    Raises:
        ShapeError: there are none, or of another shape or dtype.
        DataError: one is not finite, or above 0.
    """
    if ref_logprobs is None:
        raise ShapeError(f"ref_logprobs: got None, needed for reference_kl.coef={config.coef}")
    check_shape(tuple(response_mask.shape), ref_logprobs=ref_logprobs)
    check_full_precision(ref_logprobs=ref_logprobs)
    return flatten_logprobs(response_mask, ref_logprobs=ref_logprobs)


def reference_penalties(config: ReferenceKLConfig, batch: CreditBatch) -> Tensor:
    """``-coef * sum_t k(log pi_old(o_t) - log pi_ref(o_t))`` of every response of the batch, ``[R]`` float64.

    It is added to the outcome as the length penalty is. With ``k1`` the expected reward then has the KL divergence of
    whole responses in it, ``r - coef * log(pi / pi_ref)`` (arXiv 2203.02155, Eq. 2; 2402.14740), and the policy
    gradient is unbiased; of the other estimators it is not (arXiv 2512.21852).

    Args:
        config: coefficient and estimator.
        batch: this rank's tokens.

    Collectives: one ``gather``.
    """
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    differences = (batch.old_logprobs - batch.ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    lengths = batch.lengths.to(differences.device)
    divergence = exact_sum(kl_estimate(differences, config.estimator), batch.row, lengths, Reduction())
    return -config.coef * significant(batch.reduction.gather(divergence.total)[0])
