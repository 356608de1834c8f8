"""From shares to shaped rewards: the formulations of GTPO and, with beta for alpha, of GRPO-S."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gtpo_megatron.algorithms.share_grid import ShareRule

SINGLE_POOL = ("v1", "v1_clipped")
"""Formulations that standardise all values together, zeros included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRule:
    """Shaped reward of one side: ``clip(base + slope * share, low, high)``, then the length penalty is added."""

    base: float
    slope: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_clipped(self) -> bool:
        """Whether the interval is bounded."""
        return self.low > -math.inf or self.high < math.inf

    def reward(self, share: Tensor) -> Tensor:
        """``[...]`` float64 -> float64, monotone."""
        return (self.base + self.slope * share).clamp(self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRule:
    """What shaped rewards are standardised over.

    Attributes:
        spans_batch: all responses instead of the group's.
        kind: which values make a pool.
        ddof: 0 or 1.
        eps: added to the std.
        divides_by_std: False only centres (Dr.GRPO).
    """

    spans_batch: bool
    kind: Literal["joint_zero", "per_set", "combined"] = "joint_zero"
    ddof: int = 0
    eps: float = 0.0
    divides_by_std: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapingRules:
    """How weights become advantages.

    Attributes:
        share: how they are compared.
        sides: shaped reward of wrong and of correct responses, in this order.
        pool: what shaped rewards are standardised over.
    """

    share: ShareRule
    sides: tuple[SideRule, SideRule]
    pool: PoolRule


def formulation_sides(
    formulation: Literal["v1", "v1_clipped", "v2", "v6"], base: float, bonus: float, kappa: float | None
) -> tuple[SideRule, SideRule]:
    """The shaped reward of wrong and of correct responses, in this order.

    ==========  =========================================================  ==========================  ===============
    name        correct                                                    wrong                       equations
    ==========  =========================================================  ==========================  ===============
    v1          ``base + bonus x``                                         ``0``                       [S 2], [S 5]
    v1_clipped  ``clip(base + bonus x, 1, base + base / kappa)``           ``0``                       [S 11]
    v2          as v1; as v1_clipped where kappa is set                    ``-y``                      [S 13], [S 17]
    v6          ``base + bonus x``                                         ``-base - bonus y``         [I 3-4], [I 8-9]
    ==========  =========================================================  ==========================  ===============

    Args:
        formulation: its name.
        base: alpha1 or beta1.
        bonus: alpha2 or beta2.
        kappa: bound of the clipped bonus, or None.
    """
    correct = SideRule(base=base, slope=bonus)
    if kappa is not None:
        correct = SideRule(base=base, slope=bonus, low=1.0, high=base + base / kappa)
    wrong = {"v2": SideRule(base=0.0, slope=-1.0), "v6": SideRule(base=-base, slope=-bonus)}
    return wrong.get(formulation, SideRule(base=0.0, slope=0.0)), correct
