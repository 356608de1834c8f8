"""Algorithms: one configuration class each. The class decides the formulas; its fields are their constants and options.

An algorithm of your own is a subclass of ``AlgorithmConfig`` in a file of your own, see docs/your_own_algorithm.md.
"""

from gtpo_megatron.config.algorithm.base import (
    AlgorithmConfig,
    ClipSettings,
    DynamicSamplingConfig,
    KLEstimator,
    OffPolicyConfig,
    ReferenceConfig,
    ReferenceKLConfig,
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
from gtpo_megatron.config.algorithm.distill import DistillConfig, TeacherConfig
from gtpo_megatron.config.algorithm.entropy_credit import EntropyCreditSettings, GRPOSConfig, GTPOConfig
from gtpo_megatron.config.algorithm.rivals import (
    DPPOConfig,
    EAPOConfig,
    FIPOConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    STAREConfig,
)

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
    RLOOConfig,
    REINFORCEPlusPlusConfig,
    EAPOConfig,
    STAREConfig,
    FIPOConfig,
    DPPOConfig,
    DistillConfig,
)
"""The built-in ones. ``algorithms.registry`` says what each does."""

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "CISPOConfig",
    "ClipCovConfig",
    "ClipSettings",
    "DAPOConfig",
    "DPPOConfig",
    "DistillConfig",
    "DrGRPOConfig",
    "DynamicSamplingConfig",
    "EAPOConfig",
    "EntropyAdvantageConfig",
    "EntropyCreditSettings",
    "FIPOConfig",
    "GRPOConfig",
    "GRPOSConfig",
    "GSPOConfig",
    "GTPOConfig",
    "KLCovConfig",
    "KLEstimator",
    "OffPolicyConfig",
    "REINFORCEPlusPlusConfig",
    "RLOOConfig",
    "ReferenceConfig",
    "ReferenceKLConfig",
    "STAREConfig",
    "SurrogateSettings",
    "TeacherConfig",
    "TopEntropyConfig",
]
