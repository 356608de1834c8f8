"""What every algorithm's configuration has."""

from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from gtpo_megatron.config.algorithm.length_penalty import LengthPenaltyConfig, NoLengthPenalty
from gtpo_megatron.config.algorithm.reference_kl import ReferenceKLConfig
from gtpo_megatron.config.checks import (
    require_choice,
    require_fraction,
    require_non_negative,
)
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError

Scope: TypeAlias = Literal["group", "batch"]


@configuration
class OffPolicyConfig:
    """Importance correction from the sampler's policy to the trainer's old policy: ``c = pi_old / pi_rollout``.

    Its statistics are computed whenever the sampler's log-probs are at hand, whatever the mode.

    Attributes:
        mode: ``off`` multiplies nothing; ``truncate`` multiplies the loss by ``c`` clamped to [lower, upper]; ``mask``
            by ``c`` where it lies in [lower, upper] and by 0 elsewhere.
        level: ``token``: one ``c`` a token; ``sequence``: the product over the response; ``geometric``: its length-th
            root.
        lower: 0 means no lower bound.
        upper: largest factor.
        veto_nats: a response with a token of which ``|log c|`` is larger is dropped: its loss is multiplied by 0, and
            it stays in the denominator. With every mode, ``off`` included; 0 drops none.
    """

    mode: Literal["off", "truncate", "mask"] = "off"
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: NonNegativeFloat = 0.0
    upper: PositiveFloat = 2.0
    veto_nats: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise ConfigError(f"lower={self.lower}: must be less than upper={self.upper}")

    @property
    def is_on(self) -> bool:
        """Whether any loss is multiplied by anything."""
        return self.mode != "off" or self.veto_nats > 0


@configuration
class DynamicSamplingConfig:
    """Replaces groups whose responses are all correct or all wrong by fresh ones (DAPO, arXiv 2503.14476).

    Attributes:
        enabled: False keeps every group.
        max_refills: generation rounds after the first; when they are used up the step goes on with what there is, or
            stops with a message where there is nothing.
    """

    enabled: bool = False
    max_refills: PositiveInt = 10


@configuration
class AlgorithmConfig:
    """What every algorithm has.

    Attributes:
        std_ddof: 0 divides by ``n`` (population), 1 by ``n - 1``.
        std_eps: added to the standard deviation.
        success_threshold: a response is correct where its raw outcome reward is at least this.
        length_penalty: added to the (shaped) reward.
        reference_kl: divergence from a reference policy, in the loss or in the reward.
        off_policy: correction from sampler to trainer.
        dynamic_sampling: replaces groups without signal.
    """

    std_ddof: int = 0
    std_eps: NonNegativeFloat = 0.0
    success_threshold: float = 0.5
    length_penalty: LengthPenaltyConfig = NoLengthPenalty()
    reference_kl: ReferenceKLConfig = ReferenceKLConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    def __post_init__(self) -> None:
        require_choice("std_ddof", self.std_ddof, (0, 1))

    def check_run(self, *, update: UpdateConfig, rollout: RolloutConfig) -> None:  # noqa: ARG002 - for others to look at
        """Refuses a run that this algorithm cannot have; a class of yours may add to it.

        Args:
            update: of the run.
            rollout: of the run.

        Raises:
            ConfigError: responses of older weights without an importance correction.
        """
        if rollout.max_staleness and self.off_policy.mode == "off":
            raise ConfigError(
                f"rollout.max_staleness={rollout.max_staleness} with algorithm.off_policy.mode='off': responses "
                f"of older weights need an importance correction; use mode='truncate' or 'mask', or max_staleness=0"
            )


@configuration
class ClipSettings(AlgorithmConfig):
    """Algorithms that clip an importance ratio to [1 - clip_eps_low, 1 + clip_eps_high].

    Attributes:
        clip_eps_low: the ratio is clipped below at 1 minus this.
        clip_eps_high: the ratio is clipped above at 1 plus this; DAPO's clip-higher is 0.28.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.28

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)  # zero-argument super() breaks under slots=True
        require_fraction(clip_eps_low=self.clip_eps_low)
        require_non_negative(clip_eps_high=self.clip_eps_high)


@configuration
class SurrogateSettings(ClipSettings):
    """Algorithms with the objective ``min(w A, clip(w) A)``.

    Attributes:
        dual_clip: where ``A < 0`` the objective is at least ``dual_clip * A`` (arXiv 1912.09729); None: unbounded.
    """

    dual_clip: float | None = None

    def __post_init__(self) -> None:
        ClipSettings.__post_init__(self)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip={self.dual_clip!r}: must be greater than 1, or None")


def check_sequence_correction(off_policy: OffPolicyConfig) -> None:
    """A loss with one ratio per response is corrected by one factor per response.

    Raises:
        ConfigError: the correction has a factor per token.
    """
    if off_policy.mode != "off" and off_policy.level == "token":
        raise ConfigError(
            "off_policy.level='token': a loss with one ratio a response needs one factor a response; "
            "use 'sequence' or 'geometric'"
        )
