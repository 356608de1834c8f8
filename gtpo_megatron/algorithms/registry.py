"""The built-in algorithms, one record each, and how a configuration finds its record."""

import sys

from gtpo_megatron.algorithms.algorithm import Algorithm
from gtpo_megatron.algorithms.credit.entropy_advantage import entropy_advantage_credit
from gtpo_megatron.algorithms.credit.entropy_weights import check_weights
from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.credit.grpo_s import grpo_s_credit
from gtpo_megatron.algorithms.credit.gtpo import gtpo_credit
from gtpo_megatron.algorithms.losses.cispo import cispo_loss
from gtpo_megatron.algorithms.losses.clipped_surrogate import (
    response_clip_metrics,
    response_surrogate,
    token_surrogate,
)
from gtpo_megatron.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov
from gtpo_megatron.algorithms.losses.denominators import Denominator
from gtpo_megatron.algorithms.losses.top_entropy import select_top_entropy, top_entropy_loss
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DrGRPOConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    TopEntropyConfig,
)
from gtpo_megatron.errors import ConfigError


def _configured(config: GTPOConfig | GRPOSConfig | GRPOConfig | DAPOConfig) -> Denominator:
    return Denominator(unit=config.loss_denominator)


BUILT_IN: tuple[Algorithm, ...] = (
    Algorithm(
        config=GTPOConfig,
        about="rewards shaped by the entropy of each token (2508.04349)",
        credit=gtpo_credit,
        loss=token_surrogate,
        denominator=_configured,
        takes_shaping_mask=True,
        check=check_weights,
    ),
    Algorithm(
        config=GRPOSConfig,
        about="rewards shaped by the mean entropy of each response (2508.04349)",
        credit=grpo_s_credit,
        loss=response_surrogate,
        ratio_of="response",
        denominator=_configured,
        metrics=response_clip_metrics,
        takes_shaping_mask=True,
        check=check_weights,
    ),
    Algorithm(
        config=GRPOConfig,
        about="rewards standardised over the group (2402.03300)",
        credit=group_relative_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=DAPOConfig,
        about="GRPO with clip-higher, dynamic sampling, token-level loss (2503.14476)",
        credit=group_relative_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=DrGRPOConfig,
        about="GRPO without division by std and length (2503.20783)",
        credit=group_relative_credit,
        loss=token_surrogate,
        denominator=lambda config: Denominator(tokens_per_response=config.norm_tokens),
    ),
    Algorithm(
        config=GSPOConfig,
        about="one geometric-mean ratio per response (2507.18071)",
        credit=group_relative_credit,
        loss=response_surrogate,
        ratio_of="response",
        metrics=response_clip_metrics,
    ),
    Algorithm(
        config=CISPOConfig,
        about="truncated, detached ratio times the policy gradient (2506.13585)",
        credit=group_relative_credit,
        loss=cispo_loss,
    ),
    Algorithm(
        config=EntropyAdvantageConfig,
        about="an entropy bonus on the advantage (2506.14758)",
        credit=entropy_advantage_credit,
        loss=token_surrogate,
    ),
    Algorithm(
        config=TopEntropyConfig,
        about="gradient from the tokens of highest entropy only (2506.01939)",
        credit=group_relative_credit,
        loss=top_entropy_loss,
        select=select_top_entropy,
    ),
    Algorithm(
        config=ClipCovConfig,
        about="no gradient from some tokens of high covariance (2505.22617)",
        credit=group_relative_credit,
        loss=clip_cov_loss,
        select=select_clip_cov,
    ),
    Algorithm(
        config=KLCovConfig,
        about="a penalty on the tokens of highest covariance (2505.22617)",
        credit=group_relative_credit,
        loss=kl_cov_loss,
        select=select_kl_cov,
    ),
)

_BY_CONFIG = {algorithm.config: algorithm for algorithm in BUILT_IN}


def algorithm_of(config: object) -> Algorithm:
    """The record of a configuration's class: a built-in one, or one beside the class, in its module.

    Raises:
        ConfigError: the configuration is none of an algorithm, or there is no record for exactly this class.
    """
    kind = type(config)
    if kind in _BY_CONFIG:
        return _BY_CONFIG[kind]
    if not isinstance(config, AlgorithmConfig):
        known = ", ".join(algorithm.config.__name__ for algorithm in BUILT_IN)
        raise ConfigError(f"config: got {kind.__name__} ({config!r}), expected one of {known}, or a class of your own")
    found = [value for value in vars(sys.modules[kind.__module__]).values() if isinstance(value, Algorithm)]
    own = [algorithm for algorithm in found if algorithm.config is kind]
    if len(own) != 1:
        raise ConfigError(
            f"algorithm {kind.__module__}:{kind.__qualname__}: {len(own)} records of it in its module, expected one: "
            f"NAME = Algorithm(config={kind.__name__}, ...) at the top level, see docs/your_own_algorithm.md"
        )
    return own[0]
