"""Algorithms: one configuration class each. The class decides the formulas; its fields are their constants and options.

An algorithm of your own is a subclass of ``AlgorithmConfig`` in a file of your own, see docs/your_own_algorithm.md.
"""

from gtpo_megatron.config.algorithm.base import (
    AlgorithmConfig,
    ClipSettings,
    DynamicSamplingConfig,
    OffPolicyConfig,
    SurrogateSettings,
)
from gtpo_megatron.config.algorithm.baselines import (
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DrGRPOConfig,
    EntropyAdvantageConfig,
    GRPOConfig,
    GSPOConfig,
    KLCovConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.entropy_credit import EntropyCreditSettings, GRPOSConfig, GTPOConfig

ALGORITHMS: tuple[type[AlgorithmConfig], ...] = (
    GTPOConfig,
    GRPOSConfig,
    GRPOConfig,
    DAPOConfig,
    DrGRPOConfig,
    GSPOConfig,
    CISPOConfig,
    EntropyAdvantageConfig,
    TopEntropyConfig,
    ClipCovConfig,
    KLCovConfig,
)
"""The built-in ones. ``algorithms.registry`` says what each does."""

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "CISPOConfig",
    "ClipCovConfig",
    "ClipSettings",
    "DAPOConfig",
    "DrGRPOConfig",
    "DynamicSamplingConfig",
    "EntropyAdvantageConfig",
    "EntropyCreditSettings",
    "GRPOConfig",
    "GRPOSConfig",
    "GSPOConfig",
    "GTPOConfig",
    "KLCovConfig",
    "OffPolicyConfig",
    "SurrogateSettings",
    "TopEntropyConfig",
]
