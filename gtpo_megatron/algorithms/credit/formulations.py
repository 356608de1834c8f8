"""Shaped rewards of each version of the paper, from the entropy weights ``x`` and ``y``."""

from typing import Literal

import torch
from torch import Tensor

SINGLE_POOL = ("v1", "v1_clipped")
"""Formulations in which incorrect responses earn 0; all values are standardised together."""


def shaped_reward(
    formulation: Literal["v1", "v1_clipped", "v2", "v6"],
    is_correct: Tensor,
    share: Tensor,
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
        share: ``[N]`` float64, ``x`` on O+ and ``y`` on O-.
        base: alpha1 or beta1.
        bonus: alpha2 or beta2.
        kappa: bound of the clipped bonus, or None.
    """
    affine = (bonus * share).add_(base)
    positive = affine if kappa is None else affine.clamp(1.0, base + base / kappa)
    negative = {"v2": share, "v6": affine}.get(formulation, torch.zeros(()).to(share))
    return torch.where(is_correct, positive, -negative)
