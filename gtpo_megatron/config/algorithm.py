"""Algorithms: one configuration class each. The class decides the formulas; its fields are their constants and options.

Equation numbers: [S n] arXiv 2508.04349v1, [I n] arXiv 2508.04349v6.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gtpo_megatron.config.checks import (
    require_choice,
    require_fraction,
    require_non_negative,
    require_positive,
    require_types,
)
from gtpo_megatron.config.length_penalty import LengthPenaltyConfig, NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.errors import ConfigError

Formulation: TypeAlias = Literal["v1", "v1_clipped", "v2", "v6"]
WeightSource: TypeAlias = Literal["entropy", "uniform", "shuffled", "surprisal"]
Side: TypeAlias = Literal["both", "positive", "negative"]
Scope: TypeAlias = Literal["group", "batch"]
Pool: TypeAlias = Literal["joint_zero", "per_set", "combined"]
Mean: TypeAlias = Literal["arithmetic", "geometric"]
Axis: TypeAlias = Literal["position", "response", "matrix"]


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """

    mode: Literal["off", "truncate", "mask"] = "off"
    level: Literal["token", "sequence", "geometric"] = "token"
    lower: float = 0.0
    upper: float = 2.0

    def __post_init__(self) -> None:
        require_types(self)
        require_non_negative(lower=self.lower)
        require_positive(upper=self.upper)
        if self.lower >= self.upper:
            raise ConfigError(f"lower={self.lower}: must be less than upper={self.upper}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Replaces groups whose responses are all correct or all wrong by fresh ones (DAPO, arXiv 2503.14476).

    Attributes:
        enabled: False keeps every group.
        max_refills: generation rounds after the first; when they are used up the step goes on with what there is, or
            stops with a message where there is nothing.
    """

    enabled: bool = False
    max_refills: int = 10

    def __post_init__(self) -> None:
        require_types(self)
        require_positive(max_refills=self.max_refills)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonSettings:
    """What every algorithm has.

    Attributes:
        std_ddof: 0 divides by ``n`` (population), 1 by ``n - 1``.
        std_eps: added to the standard deviation.
        success_threshold: a response is correct where its raw outcome reward is at least this.
        length_penalty: added to the (shaped) reward.
        off_policy: correction from sampler to trainer.
        dynamic_sampling: replaces groups without signal.
    """

    std_ddof: int = 0
    std_eps: float = 0.0
    success_threshold: float = 0.5
    length_penalty: LengthPenaltyConfig = NoLengthPenalty()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    def __post_init__(self) -> None:
        require_types(self)  # the fields of the class that this is part of, too
        require_choice("std_ddof", self.std_ddof, (0, 1))
        require_non_negative(std_eps=self.std_eps)
        if not math.isfinite(self.success_threshold):
            raise ConfigError(f"success_threshold={self.success_threshold!r}: must be finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings(CommonSettings):
    """Algorithms that clip an importance ratio to [1 - clip_eps_low, 1 + clip_eps_high]."""

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.28

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)  # zero-argument super() breaks under slots=True
        require_fraction(clip_eps_low=self.clip_eps_low)
        require_non_negative(clip_eps_high=self.clip_eps_high)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurrogateSettings(ClipSettings):
    """Algorithms with the objective ``min(w A, clip(w) A)``.

    Attributes:
        dual_clip: where ``A < 0`` the objective is at least ``dual_clip * A`` (arXiv 1912.09729); None: unbounded.
    """

    dual_clip: float | None = None

    def __post_init__(self) -> None:
        ClipSettings.__post_init__(self)
        if self.dual_clip is not None and not (math.isfinite(self.dual_clip) and self.dual_clip > 1):
            raise ConfigError(f"dual_clip={self.dual_clip!r}: must be greater than 1, or None")


# ------------------------------------------------------------------------------------------- GTPO and GRPO-S (this
# paper)
@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyCreditSettings(SurrogateSettings):
    """What GTPO and GRPO-S share: rewards shaped by entropy relative to other responses.

    Attributes:
        formulation: ``v1`` [S 2-8], ``v1_clipped`` [S 11-12], ``v2`` [S 13-19], ``v6`` [I 3-11].
        kappa: bound of the clipped bonus, ``clip(., 1, alpha1 + alpha1 / kappa)``; ``v1_clipped`` needs it, ``v2``
            takes it for its positive side.
        entropy_scope: whose entropies a response is compared with: its group's or the whole batch's.
        entropy_mean: entropies are compared with their arithmetic or (App. C) geometric mean.
        advantage_pool: what R+ and R- are standardised over. ``joint_zero``: all of the scope, r+ being 0 on wrong and
            r-
            0 on correct responses; ``per_set``: own values only (advantages then do not depend on alpha); ``combined``:
            one pool of both. Formulations ``v1`` and ``v1_clipped`` have one pool anyway.
        entropy_floor: added to every entropy; nats.
        entropy_clip: entropies are clamped to (lowest, highest) before anything else; nats.
        one_sided_groups: groups all correct or all wrong get ``zero`` advantage and stay out of the pools, or ``keep``.
        weight_source: what stands in the place of entropy: the controls ``uniform``, ``shuffled`` and ``surprisal``
            (minus the token's old log-prob).
        weight_seed: of ``shuffled``.
        shaped_sides: ``positive`` or ``negative`` shapes correct or wrong responses only; the others weigh uniformly.
        unshaped_patterns: regular expressions; tokens that hold a part of a match in the response's text (formatting:
            ``</?think>``, ``Final answer:``) are compared with nothing and get the neutral share 1.
        loss_denominator: ``batch``: all tokens (responses, for GRPO-S) of the mini-batch; ``group``: mean over groups
            of each group's mean.
    """

    formulation: Formulation = "v6"
    kappa: float | None = None
    entropy_scope: Scope = "group"
    entropy_mean: Mean = "arithmetic"
    advantage_pool: Pool = "joint_zero"
    entropy_floor: float = 1e-8
    entropy_clip: tuple[float, float] | None = None
    one_sided_groups: Literal["zero", "keep"] = "zero"
    weight_source: WeightSource = "entropy"
    weight_seed: int = 0
    shaped_sides: Side = "both"
    unshaped_patterns: tuple[str, ...] = ()
    loss_denominator: Scope = "batch"

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_non_negative(entropy_floor=self.entropy_floor, weight_seed=self.weight_seed)
        for pattern in self.unshaped_patterns:
            _check_pattern(pattern)
        if self.entropy_clip is not None:
            low, high = self.entropy_clip
            if not (0 <= low < high and math.isfinite(high)):
                raise ConfigError(
                    f"entropy_clip={self.entropy_clip}: must be (lowest, highest) with 0 <= lowest < highest"
                )


def _check_pattern(pattern: str) -> None:
    try:
        matches_nothing = re.compile(pattern).search("") is not None
    except re.error as error:
        raise ConfigError(f"unshaped_patterns: {pattern!r} is no regular expression: {error}") from error
    if matches_nothing:
        raise ConfigError(f"unshaped_patterns: {pattern!r} matches the empty text; it must name at least a character")


def _check_bonus(name: str, base: float, bonus: float, formulation: str, kappa: float | None) -> None:
    """``base`` and ``bonus`` are alpha1 and alpha2 (or beta1 and beta2); ``name`` is alpha or beta."""
    require_non_negative(**{f"{name}1": base, f"{name}2": bonus})
    if base + bonus == 0:
        raise ConfigError(f"{name}1=0 and {name}2=0: every shaped reward would be 0; one of them must be greater")
    if kappa is None:
        if formulation == "v1_clipped":
            raise ConfigError("kappa=None: formulation 'v1_clipped' needs kappa > 1, the paper's bound of the bonus")
        return
    if formulation not in ("v1_clipped", "v2"):
        raise ConfigError(
            f"kappa={kappa}: formulation {formulation!r} does not clip; use None, or 'v1_clipped' or 'v2'"
        )
    if not (math.isfinite(kappa) and kappa > 1):
        raise ConfigError(f"kappa={kappa!r}: must be greater than 1")
    if not math.isclose(base + bonus, 1.0, abs_tol=1e-9):
        raise ConfigError(f"{name}1={base}, {name}2={bonus}: the clipped bonus needs {name}1 + {name}2 = 1 [S 11]")
    if base < kappa / (kappa + 1) - 1e-12:
        raise ConfigError(
            f"{name}1={base}, kappa={kappa}: the clip interval [1, {name}1 + {name}1/kappa] = "
            f"[1, {base + base / kappa:.6g}] is empty; raise {name}1 to kappa/(kappa+1) = {kappa / (kappa + 1):.6g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GTPOConfig(EntropyCreditSettings):
    """Token-level shaping, GTPO [S 2-4, 11-16; I 3-7].

    Attributes:
        alpha1: weight of the outcome; 1 in ``v1`` and plain ``v2``.
        alpha2: weight of the entropy bonus; the ``alpha`` of ``v1``.
        entropy_axis: what an entropy is compared with: the same ``position`` of other responses, the rest of its own
            ``response``, or the whole ``matrix`` of its set [S sec. 5].
        advantage_scope: tokens are standardised over the whole batch or their group [S 14].
    """

    alpha1: float = 1.0
    alpha2: float = 0.1
    entropy_axis: Axis = "position"
    advantage_scope: Scope = "batch"

    def __post_init__(self) -> None:
        EntropyCreditSettings.__post_init__(self)
        _check_bonus("alpha", self.alpha1, self.alpha2, self.formulation, self.kappa)


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOSConfig(EntropyCreditSettings):
    """Sequence-level shaping, GRPO-S [S 5-8, 17-19; I 8-11].

    Attributes:
        beta1: weight of the outcome; 1 in ``v1`` and plain ``v2``.
        beta2: weight of the entropy bonus; the ``beta`` of ``v1``.
        sequence_entropy_mean: how token entropies make a response's.
        ratio_mean: how token ratios make a response's: the paper's arithmetic mean, or GSPO's geometric one.
        advantage_scope: responses are standardised over their group or the whole batch.
    """

    beta1: float = 1.0
    beta2: float = 0.1
    sequence_entropy_mean: Mean = "arithmetic"
    ratio_mean: Mean = "arithmetic"
    advantage_scope: Scope = "group"

    def __post_init__(self) -> None:
        EntropyCreditSettings.__post_init__(self)
        _check_bonus("beta", self.beta1, self.beta2, self.formulation, self.kappa)
        _check_sequence_correction(self.off_policy)


def _check_sequence_correction(off_policy: OffPolicyConfig) -> None:
    if off_policy.mode != "off" and off_policy.level == "token":
        raise ConfigError(
            "off_policy.level='token': a loss with one ratio a response needs one factor a response; "
            "use 'sequence' or 'geometric'"
        )


# ---------------------------------------------------------------------------------------------------------- the
# baselines
@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(SurrogateSettings):
    """GRPO (arXiv 2402.03300) without its KL term: rewards standardised over the group.

    Attributes:
        loss_denominator: ``response``: mean over responses of each one's token mean (the paper's); ``batch``: all
            tokens; ``group``: mean over groups of each group's token mean.
    """

    clip_eps_high: float = 0.2
    loss_denominator: Literal["response", "batch", "group"] = "response"


@dataclass(frozen=True, kw_only=True, slots=True)
class DAPOConfig(SurrogateSettings):
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, soft overlong penalty.

    Attributes:
        loss_denominator: all tokens of the mini-batch, or mean over groups of each group's token mean.
    """

    length_penalty: LengthPenaltyConfig = SoftOverlongPenalty(applies_to="all")
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig(enabled=True)
    loss_denominator: Scope = "batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGRPOConfig(SurrogateSettings):
    """Dr.GRPO (arXiv 2503.20783): advantages without division by the std, a loss without division by the length.

    Attributes:
        norm_tokens: every response counts as this many tokens in the denominator; the generation limit, as a rule.
            It scales the loss, and so the gradient that is clipped, by a constant; nothing else hangs on it.
    """

    clip_eps_high: float = 0.2
    norm_tokens: int = 4096

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_positive(norm_tokens=self.norm_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPOConfig(SurrogateSettings):
    """GSPO (arXiv 2507.18071): one ratio a response, the geometric mean of its tokens'; hence the narrow clip range."""

    clip_eps_low: float = 3e-4
    clip_eps_high: float = 4e-4

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        _check_sequence_correction(self.off_policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPOConfig(ClipSettings):
    """CISPO (MiniMax-M1, arXiv 2506.13585): a clipped, detached ratio times the policy gradient; no token is dropped.

    The M1 paper sets no lower bound (``clip_eps_low=1``) and prints no upper one; the default truncates at 5, as in
    arXiv 2510.13786.
    """

    clip_eps_low: float = 1.0
    clip_eps_high: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyAdvantageConfig(SurrogateSettings):
    """Entropy added to the advantage: ``A + min(coefficient H, |A| / bound)`` (arXiv 2506.14758).

    Attributes:
        coefficient: ``alpha`` there; 0.4 with GRPO.
        bound: ``kappa`` there; above 1 the bonus never flips a sign.
    """

    coefficient: float = 0.4
    bound: float = 2.0

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_non_negative(coefficient=self.coefficient)
        if not (math.isfinite(self.bound) and self.bound > 1):
            raise ConfigError(f"bound={self.bound!r}: must be greater than 1, or the bonus could flip signs")


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipCovConfig(SurrogateSettings):
    """Clip-Cov (arXiv 2505.22617): a few random tokens of high covariance get no gradient.

    The covariance is that of a token's log-prob under the old policy and its advantage, over the batch.

    Attributes:
        clip_fraction: share of the batch's tokens.
        cov_low: tokens with a covariance in [cov_low, cov_high] can be chosen.
        cov_high: see ``cov_low``.
        seed: of the choice.
    """

    clip_eps_high: float = 0.2
    clip_fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        require_fraction(clip_fraction=self.clip_fraction)
        require_non_negative(seed=self.seed)
        if not self.cov_low < self.cov_high:
            raise ConfigError(f"cov_low={self.cov_low}: must be less than cov_high={self.cov_high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KLCovConfig(CommonSettings):
    """KL-Cov (arXiv 2505.22617): no clipping; tokens of highest covariance are held to the old policy.

    The penalty is ``kl_coef * |log ratio|``, whose derivative at the old policy is 0: it acts from the second update of
    a rollout batch on.

    Attributes:
        penalised_fraction: share of the batch's tokens.
        kl_coef: strength of the penalty.
    """

    penalised_fraction: float = 2e-3
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        require_fraction(penalised_fraction=self.penalised_fraction)
        require_non_negative(kl_coef=self.kl_coef)


AlgorithmConfig: TypeAlias = (
    GTPOConfig
    | GRPOSConfig
    | GRPOConfig
    | DAPOConfig
    | DrGRPOConfig
    | GSPOConfig
    | CISPOConfig
    | EntropyAdvantageConfig
    | TopEntropyConfig
    | ClipCovConfig
    | KLCovConfig
)

ALGORITHMS: tuple[type, ...] = get_args(AlgorithmConfig)
"""Every class that names an algorithm."""
