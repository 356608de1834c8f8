"""A weight relative to the mean of those that it is compared with: ``x[i,t]`` of O+, ``y[j,t]`` of O-."""

from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.credit.comparison import Comparison
from gtpo_megatron.algorithms.exact_sum import exact_sum, significant


def relative_weight(
    weight: Tensor, peers: Comparison, mean: Literal["arithmetic", "geometric"], *, compared: Tensor | None = None
) -> Tensor:
    """``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t``, and ``y[j,t]`` with ``1/H``, O- and ``h_t``.

    Geometric [I App. C]: ``x[i,t] = H[i,t] / (prod_{k in O+} H[k,t]) ** (1 / d_t)``. Equal weights have exactly 1.

    Args:
        weight: ``[N]`` float64, positive: ``H`` on O+, ``1/H`` on O-.
        peers: what each is compared with.
        mean: of the peers.
        compared: ``[N]`` bool; other tokens are in no mean and have 1. None: all are compared.
    """
    value = significant(weight.log() if mean == "geometric" else weight)
    if compared is not None:
        value = torch.where(compared, value, 0.0)
    average = exact_sum(value, peers.key, peers.count, peers.reduction).mean.index_select(0, peers.key)
    share = value.sub_(average).exp_() if mean == "geometric" else value.div_(average)
    return share if compared is None else torch.where(compared, share, 1.0)
