"""A reference policy, and the KL divergence from it as a part of the objective."""

from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat, NonNegativeInt

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]


@configuration
class ReferenceKLConfig:
    """``coef * KL(pi || pi_ref)``, estimated from the sampled tokens; docs/algorithms.md has every formula.

    With ``d = log pi - log pi_ref`` of a token: ``k1 = d``, ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d``. The defaults,
    but for ``coef``, are GRPO as published (arXiv 2402.03300, Eq. 3-4).

    Attributes:
        coef: ``beta``; 0: there is no such part.
        place: ``loss``: a term of every token's loss, under the algorithm's own denominator. ``reward``: the sum over
            a response's tokens is subtracted from its outcome, before anything is standardised; which responses are
            correct is still said by the outcome alone.
        estimator: ``k1`` is unbiased, ``k3`` too and never negative, ``k2`` is biased.
        gradient: of the term in the loss. ``estimator``: that of the estimator as it stands, which on average is 0 for
            ``k1``, that of ``KL(pi || pi_ref)`` for ``k2`` and that of ``KL(pi_ref || pi)`` for ``k3``. ``unbiased``:
            the value of the estimator with the gradient of ``KL(pi || pi_ref)``, ratios to the old policy included
            (arXiv 2512.02556, Eq. 7; in the first update of a rollout batch k2's gradient).
    """

    coef: NonNegativeFloat = 0.0
    place: Literal["loss", "reward"] = "loss"
    estimator: KLEstimator = "k3"
    gradient: Literal["estimator", "unbiased"] = "estimator"

    def __post_init__(self) -> None:
        if self.place == "reward" and self.gradient == "unbiased":
            raise ConfigError(
                "gradient='unbiased' with place='reward': nothing flows back through a reward; use "
                "gradient='estimator', with estimator='k1' for the gradient of KL(pi || pi_ref)"
            )

    @property
    def in_loss(self) -> bool:
        """It is a term of the loss."""
        return self.coef > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """It is subtracted from rewards."""
        return self.coef > 0 and self.place == "reward"


@configuration
class ReferenceConfig:
    """The frozen policy that ``algorithm.reference_kl`` compares with; there is none while its ``coef`` is 0.

    Attributes:
        path: its model folder, in either format, of the same architecture as the policy; empty: the weights that the
            run starts from.
        measured: have it, and ``policy/kl_ref_nats``, while ``algorithm.reference_kl.coef`` is 0 too.
        reset_every_steps: after every so many steps the current policy becomes the reference (arXiv 2505.24864); 0:
            never.
    """

    path: str = ""
    measured: bool = False
    reset_every_steps: NonNegativeInt = 0
