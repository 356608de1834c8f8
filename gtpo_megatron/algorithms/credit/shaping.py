"""Rewards shaped by entropy, of tokens (GTPO) or of responses (GRPO-S): ``H``, then ``x`` and ``y``, then ``r``."""

from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction, combine_by_key_, exact_sum, significant
from gtpo_megatron.config.algorithm import EntropyCreditSettings
from gtpo_megatron.errors import DataError

SINGLE_POOL = ("v1", "v1_clipped")
"""Formulations in which incorrect responses earn 0; all values are standardised together."""

LEAST_ENTROPY = 2.0**-950
"""Nats. Entropies lie between this and its inverse, so that no inverse and no sum of float64 overflows."""

LARGEST_WEIGHT = 2.0**100
"""Arithmetic weights are bounded by the number of peers, geometric ones by nothing; credit is float32, to 2**128."""


def shaping_entropy(config: EntropyCreditSettings, entropy: Tensor) -> Tensor:
    """``H = clip(entropy, lowest, highest) + floor`` of ``entropy_clip`` and ``entropy_floor``, positive.

    A floor of 0 is raised to ``LEAST_ENTROPY``; this changes only comparisons of zeros, which are all equal.
    """
    clipped = entropy if config.entropy_clip is None else entropy.clamp(*config.entropy_clip)
    return clipped + max(config.entropy_floor, LEAST_ENTROPY)


def entropy_weights(
    entropy: Tensor,
    is_correct: Tensor,
    peer_set: Tensor,
    num_peers: Tensor,
    mean: Literal["arithmetic", "geometric"],
    *,
    shaped_tokens: Tensor | None,
    reduction: Reduction,
) -> Tensor:
    """``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t``, and ``y[j,t]`` with ``1/H``, O- and ``h_t``.

    Geometric [I App. C]: ``x[i,t] = H[i,t] / (prod_{k in O+} H[k,t]) ** (1 / d_t)``. Equal entropies give exactly 1.

    Args:
        entropy: ``[N]`` float64, positive.
        is_correct: ``[N]`` bool, O+; on O- the inverses are compared.
        peer_set: ``[N]`` int64 in [0, K), the set within which each entropy is compared.
        num_peers: ``[K]`` int64, size of each set over all ranks: ``d_t`` and ``h_t``.
        mean: the kind of mean over them.
        shaped_tokens: ``[N]`` bool; others are in no mean and get 1. None: all are compared.
        reduction: the ranks. Collectives: a ``max`` and a ``sum`` of ``K`` numbers; one ``max`` more for geometric
            means.

    Raises:
        DataError: a geometric weight is above ``LARGEST_WEIGHT``, on any rank.
    """
    is_geometric = mean == "geometric"
    entropy = torch.where(is_correct, entropy, 1.0 / entropy)
    entropy = significant(entropy.log() if is_geometric else entropy)
    if shaped_tokens is not None:
        entropy = torch.where(shaped_tokens, entropy, 0.0)
    average = exact_sum(entropy, peer_set, num_peers, reduction).mean
    weight = combine_by_key_(entropy, Tensor.sub_ if is_geometric else Tensor.div_, average, peer_set)
    weight = weight.exp_() if is_geometric else weight
    if shaped_tokens is not None:
        weight = torch.where(shaped_tokens, weight, 1.0)
    if is_geometric:
        largest = float(reduction.max(weight.amax().view(1) if len(weight) else weight.new_zeros(1)))
        if largest > LARGEST_WEIGHT:
            raise DataError(
                f"token_entropy: an entropy weight is {largest:.3g}, expected at most 2**100 with "
                "entropy_mean='geometric'; set entropy_clip or a higher entropy_floor, or take "
                "entropy_mean='arithmetic'"
            )
    return weight


def shaped_reward(
    formulation: Literal["v1", "v1_clipped", "v2", "v6"],
    is_correct: Tensor,
    x_or_y: Tensor,
    *,
    base: float,
    bonus: float,
    kappa: float | None,
) -> Tensor:
    """``r~`` of v1, ``r+`` and ``r-`` of v2 and v6, of tokens (GTPO) or of responses (GRPO-S).

    ==========  =========================================================  ======================  ===============
    name        on O+                                                      on O-                   equations
    ==========  =========================================================  ======================  ===============
    v1          ``base + bonus x``                                         ``0``                   [S 2], [S 5]
    v1_clipped  ``clip(base + bonus x, 1, base + base / kappa)``           ``0``                   [S 11]
    v2          as v1; as v1_clipped if kappa is set                       ``-y``                  [S 13], [S 17]
    v6          ``base + bonus x``                                         ``-base - bonus y``     [I 3-4], [I 8]
    ==========  =========================================================  ======================  ===============

    Args:
        formulation: its name.
        is_correct: ``[N]`` bool, O+.
        x_or_y: ``[N]`` float64, ``x`` on O+ and ``y`` on O-.
        base: alpha1 or beta1.
        bonus: alpha2 or beta2.
        kappa: bound of the clipped bonus, or None.
    """
    affine = (bonus * x_or_y).add_(base)
    positive = affine if kappa is None else affine.clamp(1.0, base + base / kappa)
    zero = torch.zeros(()).to(x_or_y)
    negative = {"v1": zero, "v1_clipped": zero, "v2": x_or_y, "v6": affine}[formulation]
    return torch.where(is_correct, positive, -negative)
