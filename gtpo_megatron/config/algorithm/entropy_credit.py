"""GTPO and GRPO-S, the algorithms of this project's paper."""

import math
import re
from typing import Literal, TypeAlias

from pydantic import NonNegativeFloat

from gtpo_megatron.config.algorithm.base import Scope, SurrogateSettings, check_sequence_correction
from gtpo_megatron.config.checks import require_non_negative
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

Formulation: TypeAlias = Literal["v1", "v1_clipped", "v2", "v6"]
Pool: TypeAlias = Literal["joint_zero", "per_set", "combined"]
Mean: TypeAlias = Literal["arithmetic", "geometric"]
Axis: TypeAlias = Literal["position", "turn", "response", "matrix"]


@configuration
class EntropyCreditSettings(SurrogateSettings):
    """What GTPO and GRPO-S share: rewards shaped by entropy relative to other responses.

    Attributes:
        formulation: version 1 of arXiv 2508.04349 has ``v1`` (equations 2-8 of it), ``v1_clipped`` (11-12) and ``v2``
            (13-19), version 6 ``v6`` (3-11).
        kappa: bound of the clipped bonus, ``clip(., 1, alpha1 + alpha1 / kappa)``; ``v1_clipped`` needs it, ``v2``
            takes it for its positive side.
        entropy_scope: whose entropies a response is compared with: its group's or the whole batch's.
        entropy_mean: entropies are compared with their arithmetic or (App. C) geometric mean.
        advantage_pool: values that R+ and R- hold. ``joint_zero``: all of the scope, r+ being 0 on wrong and
            r- 0 on correct responses; ``per_set``: own values only (advantages then do not depend on alpha);
            ``combined``: one pool of both. Formulations ``v1`` and ``v1_clipped`` have one pool anyway.
        entropy_floor: added to every entropy; nats.
        entropy_clip: entropies are clamped to (lowest, highest) before anything else; nats.
        one_sided_groups: groups all correct or all wrong get ``zero`` advantage and stay out of the pools, or ``keep``.
        unshaped_patterns: regular expressions; tokens that hold a part of a match in the response's text (formatting:
            ``</?think>``, ``Final answer:``) are compared with nothing and get the neutral share 1.
    """

    formulation: Formulation = "v6"
    kappa: float | None = None
    entropy_scope: Scope = "group"
    entropy_mean: Mean = "arithmetic"
    advantage_pool: Pool = "joint_zero"
    entropy_floor: NonNegativeFloat = 1e-8
    entropy_clip: tuple[float, float] | None = None
    one_sided_groups: Literal["zero", "keep"] = "zero"
    unshaped_patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        SurrogateSettings.__post_init__(self)
        for pattern in self.unshaped_patterns:
            _check_pattern(pattern)
        if self.entropy_clip is not None:
            low, high = self.entropy_clip
            if not 0 <= low < high:
                raise ConfigError(
                    f"entropy_clip={self.entropy_clip}: must be (lowest, highest) with 0 <= lowest < highest"
                )


SMALLEST_WEIGHT = 1e-9
"""Of the outcome or the bonus, if it is not 0: further out, rewards would leave float32 and their squares float64."""


def _check_pattern(pattern: str) -> None:
    try:
        matches_nothing = re.compile(pattern).search("") is not None
    except re.error as error:
        raise ConfigError(f"unshaped_patterns: {pattern!r} is no regular expression: {error}") from error
    if matches_nothing:
        raise ConfigError(f"unshaped_patterns: {pattern!r} matches the empty text; it must name at least a character")


def _check_weight(field: str, value: float, why: str) -> None:
    if value and not SMALLEST_WEIGHT <= value <= 1 / SMALLEST_WEIGHT:
        raise ConfigError(
            f"{field}={value!r}: must be 0, or between {SMALLEST_WEIGHT} and {1 / SMALLEST_WEIGHT:g}; {why}"
        )


def _check_bonus(name: str, base: float, bonus: float, formulation: str, kappa: float | None) -> None:
    """``base`` and ``bonus`` are alpha1 and alpha2 (or beta1 and beta2); ``name`` is alpha or beta."""
    require_non_negative(**{f"{name}1": base, f"{name}2": bonus})
    for field, value in ((f"{name}1", base), (f"{name}2", bonus)):
        _check_weight(field, value, f"only {name}2 / {name}1 matters once rewards are standardised")
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
    if kappa <= 1:
        raise ConfigError(f"kappa={kappa!r}: must be greater than 1")
    if not math.isclose(base + bonus, 1.0, abs_tol=1e-9):
        raise ConfigError(
            f"{name}1={base}, {name}2={bonus}: the clipped bonus needs {name}1 + {name}2 = 1 (version 1, equation 11)"
        )
    if base < kappa / (kappa + 1) - 1e-12:
        raise ConfigError(
            f"{name}1={base}, kappa={kappa}: the clip interval [1, {name}1 + {name}1/kappa] = "
            f"[1, {base + base / kappa:.6g}] is empty; raise {name}1 to kappa/(kappa+1) = {kappa / (kappa + 1):.6g}"
        )


@configuration
class GTPOConfig(EntropyCreditSettings):
    """GTPO: every token of a response has a reward of its own, by its entropy.

    Attributes:
        alpha1: weight of the outcome; 1 in ``v1`` and plain ``v2``.
        alpha2: weight of the entropy bonus; the ``alpha`` of ``v1``.
        entropy_axis: tokens that an entropy is compared with: the same ``position`` of other responses, in
            conversations the same place in the same ``turn`` (ours), the rest of its own ``response``, or the whole
            ``matrix`` of its set (section 5 of version 1).
        advantage_scope: tokens are standardised over the whole batch or their group (equation 14 of version 1).
        loss_denominator: ``batch``: all tokens of the mini-batch (the paper's); ``group``: mean over groups of each
            group's token mean; ``response``: mean over responses of each one's token mean, as GRPO's.
        turn_reward_coef: weight of a turn's own reward in a conversation, which is added to the shaped reward of each
            of its tokens (ours); 0: the rewards of turns are in the outcome only, as their sum.
    """

    alpha1: float = 1.0
    alpha2: float = 0.1
    entropy_axis: Axis = "position"
    advantage_scope: Scope = "batch"
    loss_denominator: Literal["response", "batch", "group"] = "batch"
    turn_reward_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        EntropyCreditSettings.__post_init__(self)
        _check_bonus("alpha", self.alpha1, self.alpha2, self.formulation, self.kappa)
        _check_weight("turn_reward_coef", self.turn_reward_coef, "it is relative to alpha1")


@configuration
class GRPOSConfig(EntropyCreditSettings):
    """GRPO-S: every response has a reward of its own, by its mean entropy.

    Attributes:
        beta1: weight of the outcome; 1 in ``v1`` and plain ``v2``.
        beta2: weight of the entropy bonus; the ``beta`` of ``v1``.
        sequence_entropy_mean: how token entropies make a response's.
        ratio_mean: how token ratios make a response's: the paper's arithmetic mean, or GSPO's geometric one.
        advantage_scope: responses are standardised over their group or the whole batch.
        loss_denominator: ``batch``: all responses of the mini-batch; ``group``: mean over groups of each group's mean.
    """

    beta1: float = 1.0
    beta2: float = 0.1
    sequence_entropy_mean: Mean = "arithmetic"
    ratio_mean: Mean = "arithmetic"
    advantage_scope: Scope = "group"
    loss_denominator: Scope = "batch"

    def __post_init__(self) -> None:
        EntropyCreditSettings.__post_init__(self)
        _check_bonus("beta", self.beta1, self.beta2, self.formulation, self.kappa)
        check_sequence_correction(self.off_policy)
