"""The options that algorithms share: length penalties, a reference policy, off-policy weights, dynamic sampling."""

import math
from dataclasses import replace
from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.checks import (
    require_choice,
    require_fraction,
    require_non_negative,
)
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError


@configuration
class NoLengthPenalty:
    """Length does not enter the reward."""


@configuration
class SoftOverlongPenalty:
    """A linear ramp over the last tokens before the limit (DAPO, arXiv 2503.14476; arXiv 2508.04349v1, sec. 4.5.1).

    With ``L2 = max_tokens``, ``L1 = buffer_tokens`` and ``L = L2 - L1``: 0 up to ``L``, then ``(L - length) / L1``,
    and -1 beyond ``L2``.

    Attributes:
        max_tokens: ``L2``; responses longer than this get -1. A run wants it equal to
            ``rollout.sampling.max_response_tokens``, or with an environment at most that: lengths are of the policy's
            own tokens, and the limit is one of all. A response that a limit has cut counts as ``max_tokens`` long.
        buffer_tokens: ``L1``, the width of the ramp.
        denominator: ``l1`` ends the ramp at -1; ``l2`` divides by ``L2`` as the early paper prints (the ramp then ends
            at ``-L1 / L2`` and jumps to -1).
        applies_to: ``correct`` responses only, or ``all``.
    """

    max_tokens: PositiveInt = 4096
    buffer_tokens: PositiveInt = 512
    denominator: Literal["l1", "l2"] = "l1"
    applies_to: Literal["correct", "all"] = "correct"

    def __post_init__(self) -> None:
        if self.buffer_tokens > self.max_tokens:
            raise ConfigError(f"buffer_tokens={self.buffer_tokens}: must be at most max_tokens={self.max_tokens}")

    def ending_at(self, max_tokens: int) -> "SoftOverlongPenalty":
        """The same ramp for another limit, over the same share of it."""
        buffer_tokens = max(1, self.buffer_tokens * max_tokens // self.max_tokens)
        return replace(self, max_tokens=max_tokens, buffer_tokens=buffer_tokens)


@configuration
class GroupRelativeLengthPenalty:
    """A ramp whose knee comes from the lengths of the response's own group (arXiv 2508.04349v6, App. D).

    With success rate ``p``: easy groups (``p >= easy_threshold``) take the knee from their correct responses, hard
    groups (``p <= 1 - easy_threshold``) use ``hard_group_penalty``, the others take the knee from all their responses.
    Beyond the knee ``K``: ``-0.5 (length - K) / K``, and -0.5 from ``2 K`` on.

    Attributes:
        easy_threshold: ``gamma``; the paper gives no value.
        hard_group_penalty: penalty of hard groups.
        correct_minority: groups in the middle with no more correct than wrong responses, of which the paper says
            nothing: no penalty, or the ramp on their wrong responses.
    """

    easy_threshold: float = 0.75
    hard_group_penalty: NoLengthPenalty | SoftOverlongPenalty = NoLengthPenalty()
    correct_minority: Literal["none", "incorrect"] = "none"

    def __post_init__(self) -> None:
        if not 0.5 < self.easy_threshold <= 1:
            raise ConfigError(
                f"easy_threshold={self.easy_threshold!r}: must lie in (0.5, 1], or groups would be both easy and hard"
            )


LengthPenaltyConfig: TypeAlias = NoLengthPenalty | SoftOverlongPenalty | GroupRelativeLengthPenalty


def penalty_ending_at(penalty: LengthPenaltyConfig, max_tokens: int) -> LengthPenaltyConfig:
    """A length penalty whose ramp, if it has one with a fixed end, ends at another limit."""
    match penalty:
        case SoftOverlongPenalty():
            return penalty.ending_at(max_tokens)
        case GroupRelativeLengthPenalty(hard_group_penalty=SoftOverlongPenalty() as ramp):
            return replace(penalty, hard_group_penalty=ramp.ending_at(max_tokens))
        case _:
            return penalty


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
        gradient: gradient of the term in the loss. ``estimator``: that of the estimator as it stands, which on average
            is 0 for ``k1``, that of ``KL(pi || pi_ref)`` for ``k2`` and that of ``KL(pi_ref || pi)`` for ``k3``.
            ``unbiased``: the value of the estimator with the gradient of ``KL(pi || pi_ref)``, ratios to the old policy
            included (arXiv 2512.02556, Eq. 7; in the first update of a rollout batch k2's gradient).
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
    """Replaces groups from which nothing can be learnt by fresh ones (DAPO, arXiv 2503.14476).

    Attributes:
        enabled: False keeps every group.
        keep: groups with correct and wrong responses (``mixed``), or those whose raw rewards differ by ``min_spread``
            or more (``spread``), which rewards between right and wrong make where all or none are correct.
        min_spread: least difference between the largest and the smallest reward of a group.
        min_mean: least mean raw reward of a group that is kept; None: any.
        max_mean: largest; None: any.
        max_refills: generation rounds after the first; when they are used up the step goes on with what there is, or
            stops with a message where there is nothing.
    """

    enabled: bool = False
    keep: Literal["mixed", "spread"] = "mixed"
    min_spread: PositiveFloat = 1e-6
    min_mean: float | None = None
    max_mean: float | None = None
    max_refills: PositiveInt = 10

    def __post_init__(self) -> None:
        low, high = self.mean_between
        if low > high:
            raise ConfigError(f"min_mean={low:g} exceeds max_mean={high:g}: no group would be kept")

    @property
    def mean_between(self) -> tuple[float, float]:
        """Least and largest mean reward of a group."""
        low, high = self.min_mean, self.max_mean
        return -math.inf if low is None else low, math.inf if high is None else high

    @property
    def rule(self) -> str:
        """What is kept, for messages."""
        kinds = {"mixed": "both correct and wrong responses", "spread": f"rewards {self.min_spread:g} or more apart"}
        low, high = self.mean_between
        band = "" if (low, high) == (-math.inf, math.inf) else f" and a mean reward from {low:g} to {high:g}"
        return kinds[self.keep] + band


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

    @property
    def needs_teacher(self) -> bool:
        """Whether the credit reads a teacher's log-probs: the run then has ``teacher.path``."""
        return False

    def check_run(self, *, update: UpdateConfig, rollout: RolloutConfig) -> None:  # noqa: ARG002 - for others to look at
        """Refuses a run that this algorithm cannot have; a class of yours may add to it.

        Args:
            update: updates of the run.
            rollout: sampling of the run.

        Raises:
            ConfigError: responses of older or of rounded weights without an importance correction.
        """
        if self.off_policy.mode != "off":
            return
        if rollout.max_staleness:
            raise ConfigError(
                f"rollout.max_staleness={rollout.max_staleness} with algorithm.off_policy.mode='off': responses "
                f"of older weights need an importance correction; set --algorithm.off-policy.mode truncate, or mask, "
                f"or max_staleness=0"
            )
        if rollout.dtype == "fp8":
            raise ConfigError(
                "rollout.dtype='fp8' with algorithm.off_policy.mode='off': responses of rounded weights need an "
                "importance correction; set --algorithm.off-policy.mode truncate (and --rollout.entropy-source actor), "
                "or --rollout.dtype bfloat16"
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
        dual_clip: bound where ``A < 0``: the objective is at least ``dual_clip * A`` (arXiv 1912.09729); None:
            unbounded.
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
            "set --algorithm.off-policy.level sequence, or geometric"
        )
