"""The algorithms that GTPO and GRPO-S are compared with; each class names its paper."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from gtpo_megatron.config.algorithm.base import (
    AlgorithmConfig,
    ClipSettings,
    DynamicSamplingConfig,
    LengthPenaltyConfig,
    Scope,
    SoftOverlongPenalty,
    SurrogateSettings,
    check_sequence_correction,
)
from gtpo_megatron.config.checks import require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class GRPOConfig(SurrogateSettings):
    """GRPO (arXiv 2402.03300): rewards standardised over the group; its KL term is ``reference_kl``.

    Attributes:
        loss_denominator: ``response``: mean over responses of each one's token mean (the paper's); ``batch``: all
            tokens; ``group``: mean over groups of each group's token mean.
    """

    clip_eps_high: float = 0.2
    loss_denominator: Literal["response", "batch", "group"] = "response"


@configuration
class DAPOConfig(SurrogateSettings):
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, soft overlong penalty.

    Attributes:
        loss_denominator: all tokens of the mini-batch, or mean over groups of each group's token mean.
    """

    length_penalty: LengthPenaltyConfig = SoftOverlongPenalty(applies_to="all")
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig(enabled=True)
    loss_denominator: Scope = "batch"


@configuration
class DrGRPOConfig(SurrogateSettings):
    """Dr.GRPO (arXiv 2503.20783): advantages without division by the std, a loss without division by the length.

    Attributes:
        norm_tokens: every response counts as this many tokens in the denominator; the generation limit, as a rule.
            It scales the loss, and so the gradient that is clipped, by a constant; nothing else hangs on it.
    """

    clip_eps_high: float = 0.2
    norm_tokens: PositiveInt = 4096


@configuration
class GSPOConfig(SurrogateSettings):
    """GSPO (arXiv 2507.18071): one ratio a response, the geometric mean of its tokens'; hence the narrow clip range."""

    clip_eps_low: float = 3e-4
    clip_eps_high: float = 4e-4

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        check_sequence_correction(self.off_policy)


@configuration
class CISPOConfig(ClipSettings):
    """CISPO (MiniMax-M1, arXiv 2506.13585): a clipped, detached ratio times the policy gradient; no token is dropped.

    The M1 paper sets no lower bound (``clip_eps_low=1``) and prints no upper one; the default truncates at 5, as in
    arXiv 2510.13786.
    """

    clip_eps_low: float = 1.0
    clip_eps_high: float = 4.0


@configuration
class EntropyAdvantageConfig(SurrogateSettings):
    """Entropy added to the advantage: ``A + min(coefficient H, |A| / bound)`` (arXiv 2506.14758).

    Attributes:
        coefficient: ``alpha`` there; 0.4 with GRPO.
        bound: ``kappa`` there; above 1 the bonus never flips a sign.
    """

    coefficient: NonNegativeFloat = 0.4
    bound: float = 2.0

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        if self.bound <= 1:
            raise ConfigError(f"bound={self.bound!r}: must be greater than 1, or the bonus could flip signs")


@configuration
class TopEntropyConfig(SurrogateSettings):
    """Gradient only from the tokens of highest entropy in the batch (arXiv 2506.01939).

    Attributes:
        top_fraction: share of the batch's tokens.
    """

    top_fraction: float = 0.2

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        if not 0 < self.top_fraction <= 1:
            raise ConfigError(f"top_fraction={self.top_fraction!r}: must lie in (0, 1]")


@configuration
class ClipCovConfig(SurrogateSettings):
    """Clip-Cov (arXiv 2505.22617): a few random tokens of high covariance get no gradient.

    The covariance is that of a token's log-prob under the old policy and its advantage, over the batch.

    Attributes:
        clip_fraction: share of the batch's tokens.
        cov_low: tokens with a covariance in [cov_low, cov_high] can be chosen.
        cov_high: largest covariance of a token that may be chosen.
        seed: seed of the choice.
    """

    clip_eps_high: float = 0.2
    clip_fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_fraction(clip_fraction=self.clip_fraction)
        if not self.cov_low < self.cov_high:
            raise ConfigError(f"cov_low={self.cov_low}: must be less than cov_high={self.cov_high}")


@configuration
class KLCovConfig(AlgorithmConfig):
    """KL-Cov (arXiv 2505.22617): no clipping; tokens of highest covariance are held to the old policy.

    The penalty is ``kl_coef * |log ratio|``, whose derivative at the old policy is 0: it acts from the second update of
    a rollout batch on.

    Attributes:
        penalised_fraction: share of the batch's tokens.
        kl_coef: strength of the penalty.
    """

    penalised_fraction: float = 2e-3
    kl_coef: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        require_fraction(penalised_fraction=self.penalised_fraction)
