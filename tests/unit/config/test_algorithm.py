"""Configurations that no run can have are refused with field, value and what is allowed."""

import dataclasses

import pytest

from gtpo_megatron.config.algorithm import (
    ALGORITHMS,
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    EntropyAdvantageConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    OffPolicyConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.base import (
    GroupRelativeLengthPenalty,
    NoLengthPenalty,
    SoftOverlongPenalty,
)
from gtpo_megatron.errors import ConfigError

NAN = float("nan")


def test_defaults_are_the_papers() -> None:
    gtpo = GTPOConfig()
    assert (gtpo.formulation, gtpo.alpha1, gtpo.alpha2, gtpo.kappa) == ("v6", 1.0, 0.1, None)
    assert (gtpo.entropy_scope, gtpo.entropy_axis, gtpo.entropy_mean) == ("group", "position", "arithmetic")
    assert (gtpo.advantage_scope, gtpo.advantage_pool) == ("batch", "joint_zero")
    assert (gtpo.entropy_floor, gtpo.entropy_clip, gtpo.one_sided_groups) == (1e-8, None, "zero")
    assert (gtpo.std_ddof, gtpo.std_eps, gtpo.success_threshold) == (0, 0.0, 0.5)
    assert (gtpo.clip_eps_low, gtpo.clip_eps_high) == (0.2, 0.28)
    assert gtpo.length_penalty == NoLengthPenalty()
    grpo_s = GRPOSConfig()
    assert (grpo_s.beta1, grpo_s.beta2, grpo_s.advantage_scope) == (1.0, 0.1, "group")
    assert (grpo_s.sequence_entropy_mean, grpo_s.ratio_mean) == ("arithmetic", "arithmetic")


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_algorithm_is_a_frozen_value(kind: type) -> None:
    config = kind()
    assert config == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.std_eps = 1.0
    assert config.off_policy.mode == "off"
    with pytest.raises(ConfigError, match="std_ddof=2"):
        kind(std_ddof=2)
    with pytest.raises(ConfigError, match="std_eps"):
        kind(std_eps=-1.0)
    with pytest.raises(ConfigError, match="success_threshold"):
        kind(success_threshold=NAN)


def test_only_dapo_samples_dynamically_by_default() -> None:
    assert DAPOConfig().dynamic_sampling.enabled
    assert DAPOConfig().length_penalty == SoftOverlongPenalty(applies_to="all")
    assert not GTPOConfig().dynamic_sampling.enabled


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (GTPOConfig, {"formulation": "v1_clipped"}, "kappa=None"),
        (GTPOConfig, {"kappa": 4.0}, "formulation 'v6' does not clip"),
        (GTPOConfig, {"formulation": "v2", "alpha1": 0.9, "kappa": 1.0}, "kappa=1.0: must be greater than 1"),
        (GTPOConfig, {"formulation": "v2", "alpha1": 1.0, "kappa": 4.0}, r"alpha1 \+ alpha2 = 1"),
        (
            GTPOConfig,
            {"formulation": "v1_clipped", "alpha1": 0.79, "alpha2": 0.21, "kappa": 4.0},
            r"\[1, 0.9875\] is empty; raise alpha1 to kappa/\(kappa\+1\) = 0.8",
        ),
        (GTPOConfig, {"alpha1": -1.0}, "alpha1=-1.0: must be 0 or more"),
        (GTPOConfig, {"alpha1": 0.0, "alpha2": 0.0}, "alpha1=0 and alpha2=0"),
        (GTPOConfig, {"entropy_clip": (2.0, 1.0)}, r"entropy_clip=\(2.0, 1.0\)"),
        (GTPOConfig, {"entropy_clip": (-1.0, 1.0)}, "entropy_clip"),
        (GTPOConfig, {"unshaped_patterns": ("ok", "[")}, r"unshaped_patterns: '\[' is no regular expression"),
        (GRPOSConfig, {"unshaped_patterns": ("x*",)}, r"unshaped_patterns: 'x\*' matches the empty text"),
        (GTPOConfig, {"unshaped_patterns": "abc"}, r"unshaped_patterns='abc': got str, expected tuple\[str, \.\.\.\]"),
        (GTPOConfig, {"clip_eps_low": 1.1}, "clip_eps_low=1.1"),
        (GTPOConfig, {"clip_eps_high": -0.1}, "clip_eps_high=-0.1"),
        (GTPOConfig, {"dual_clip": 1.0}, "dual_clip=1.0: must be greater than 1"),
        (GRPOSConfig, {"beta2": -0.1}, "beta2=-0.1"),
        (GRPOSConfig, {"off_policy": OffPolicyConfig(mode="mask")}, "off_policy.level='token'"),
        (GSPOConfig, {"off_policy": OffPolicyConfig(mode="truncate")}, "off_policy.level='token'"),
        (CISPOConfig, {"clip_eps_high": NAN}, "clip_eps_high=nan"),
        (EntropyAdvantageConfig, {"bound": 1.0}, "bound=1.0"),
        (TopEntropyConfig, {"top_fraction": 0.0}, "top_fraction=0.0"),
        (ClipCovConfig, {"clip_fraction": 1.5}, "clip_fraction=1.5"),
        (ClipCovConfig, {"cov_low": 5.0}, "cov_low=5.0: must be less than cov_high=5.0"),
        (KLCovConfig, {"penalised_fraction": -0.1}, "penalised_fraction"),
        (OffPolicyConfig, {"lower": 2.0}, "lower=2.0: must be less than upper=2.0"),
        (SoftOverlongPenalty, {"buffer_tokens": 5000}, "buffer_tokens=5000: must be at most max_tokens=4096"),
        (GroupRelativeLengthPenalty, {"easy_threshold": 0.5}, "easy_threshold=0.5"),
    ],
)
def test_refused(kind: type, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


def test_the_edge_of_the_clip_interval_is_allowed() -> None:
    assert GTPOConfig(formulation="v1_clipped", alpha1=0.8, alpha2=0.2, kappa=4.0).kappa == 4.0
