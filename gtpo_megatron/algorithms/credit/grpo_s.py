"""GRPO-S: the reward of each response is shaped by the mean entropy of its tokens (arXiv 2508.04349).

[I n] are the equations of version 6, [S n] those of version 1. The objective [I 10] is ``losses.clipped_surrogate`` of
one ratio per response.
"""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.credit.diagnostics import weight_metrics
from gtpo_megatron.algorithms.credit.entropy_checks import takes_inverses
from gtpo_megatron.algorithms.credit.shaping import (
    LEAST_ENTROPY,
    SINGLE_POOL,
    entropy_weights,
    shaped_reward,
    shaping_entropy,
)
from gtpo_megatron.algorithms.credit.standardise import response_pools, standardise
from gtpo_megatron.algorithms.sums import Reduction, exact_sum, significant
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import GRPOSConfig
from gtpo_megatron.errors import DataError


def grpo_s_credit(config: GRPOSConfig, batch: CreditBatch) -> Credit:
    """Shaped rewards and advantages [I 8-9; S 5, 17], one value per response, repeated on its tokens.

    With the defaults, for a response ``i`` that is correct (O+) or incorrect (O-):

    - ``Hs[i] = (1/|o_i|) sum_t H[i,t]``;
    - ``X[i] = Hs[i] / sum_{O+} Hs * n``, ``Y[i] = (1/Hs[i]) / sum_{O-} (1/Hs) * m``;
    - ``r+ = beta1 + beta2 X``, ``r- = -beta1 - beta2 Y`` [I 8];
    - ``A = (r - mean(R)) / std(R)`` over the responses of the group [I 9].

    Each rank computes ``Hs`` of its own responses; the rest is computed for all ``R`` responses on every rank.

    Collectives: ``gather``, one number per response.
    """
    table = batch.table
    mean_entropy = batch.reduction.gather(_mean_entropy(config, batch))[0][table.is_live]  # Hs
    is_correct = table.is_correct[table.is_live]  # O+
    _check_invertible(config, mean_entropy, is_correct)

    side, num_sides = table.sides(spans_batch=config.entropy_scope == "batch")
    side = side[table.is_live]  # O+ or O- of its group
    num_peers = torch.bincount(side, minlength=num_sides)  # n, m
    x_or_y = entropy_weights(  # X on O+, Y on O-
        mean_entropy,
        is_correct,
        side,
        num_peers,
        config.entropy_mean,
        shaped_tokens=None,
        reduction=Reduction(),
    )

    reward = shaped_reward(  # r+ and r- [I 8; S 5, 17]
        config.formulation, is_correct, x_or_y, base=config.beta1, bonus=config.beta2, kappa=config.kappa
    )
    reward += batch.penalties[table.is_live]  # R(i) [S 11; I App. D]

    pools = response_pools(
        batch,
        "combined" if config.formulation in SINGLE_POOL else config.advantage_pool,
        spans_batch=config.advantage_scope == "batch",
        takes_part=batch.takes_part(config.one_sided_groups),
    )
    advantage = standardise(reward, pools, ddof=config.std_ddof, eps=config.std_eps)  # A [I 9]
    metrics = weight_metrics(x_or_y, is_correct, (num_peers == 1)[side], Reduction())
    return batch.of_responses(reward, advantage, metrics)


def _mean_entropy(config: GRPOSConfig, batch: CreditBatch) -> Tensor:
    """``Hs`` of this rank's responses [S 5; I 8], or ``exp((1/|o|) sum_t log H)`` [I App. C], ``[B]`` float64."""
    entropy = shaping_entropy(config, batch.entropy)
    count = batch.lengths.to(entropy.device)
    value = significant(entropy.log() if config.sequence_entropy_mean == "geometric" else entropy)
    if batch.shaped_tokens is not None:
        num_shaped = torch.bincount(batch.row[batch.shaped_tokens], minlength=len(count))
        # a response without shaped tokens is averaged over all of its tokens
        value = torch.where(batch.shaped_tokens | (num_shaped == 0).index_select(0, batch.row), value, 0.0)
        count = torch.where(num_shaped > 0, num_shaped, count)
    mean = exact_sum(value, batch.row, count, Reduction()).mean
    return mean.exp() if config.sequence_entropy_mean == "geometric" else mean


def _check_invertible(config: GRPOSConfig, mean_entropy: Tensor, is_correct: Tensor) -> None:
    """Checks that ``1/Hs`` exists. Every rank holds all responses, so all ranks raise.

    Raises:
        DataError: an incorrect response has only zero entropies, and ``entropy_floor`` is 0.
    """
    if (
        config.entropy_floor == 0
        and takes_inverses(config)
        and bool(((mean_entropy < 2 * LEAST_ENTROPY) & ~is_correct).any())
    ):
        raise DataError(
            "token_entropy: an incorrect response has only zero entropies with entropy_floor=0: the inverse of their "
            "mean does not exist; set entropy_floor above 0"
        )
