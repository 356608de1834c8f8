"""One table of the built-in algorithms, and records that stand beside their class."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from gtpo_megatron.algorithms import Algorithm
from gtpo_megatron.algorithms.credit.group_relative import group_relative_credit
from gtpo_megatron.algorithms.losses.clipped_surrogate import token_surrogate
from gtpo_megatron.algorithms.registry import BUILT_IN, algorithm_of
from gtpo_megatron.config.algorithm import ALGORITHMS, AlgorithmConfig, GRPOConfig, GTPOConfig, OffPolicyConfig
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


def test_every_configuration_class_has_one_record() -> None:
    assert sorted(kind.__name__ for kind in ALGORITHMS) == sorted(record.config.__name__ for record in BUILT_IN)
    for record in BUILT_IN:
        assert algorithm_of(record.config()) is record
        assert record.about
        assert record.ratio_of in ("token", "response")


def test_what_is_no_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config: got str \('gtpo'\), expected one of GTPOConfig, GRPOSConfig, "):
        algorithm_of("gtpo")
    with pytest.raises(ConfigError, match=r"config: got NoneType"):
        algorithm_of(None)


@configuration
class OwnConfig(AlgorithmConfig):
    """A configuration whose record stands in this module."""


@configuration
class ChildConfig(GTPOConfig):
    """A subclass of a built-in one is an algorithm of its own."""


OWN = Algorithm(config=OwnConfig, about="a test", credit=group_relative_credit, loss=token_surrogate)


def test_a_record_beside_its_class_is_found() -> None:
    assert algorithm_of(OwnConfig(std_ddof=1)) is OWN


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, type[GRPOConfig]]:
    """A module without records, and a configuration of it."""
    module = ModuleType("module_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    @configuration
    class ModuleConfig(GRPOConfig):
        pass

    ModuleConfig.__module__ = module.__name__
    return module, ModuleConfig


def test_of_one_ratio_a_response_no_factor_a_token_is_taken(own_module: tuple[ModuleType, type[GRPOConfig]]) -> None:
    module, kind = own_module
    module.RECORD = replace(OWN, config=kind, ratio_of="response")  # type: ignore[attr-defined]
    for level in ("sequence", "geometric"):
        algorithm_of(kind(off_policy=OffPolicyConfig(mode="truncate", level=level)))
    algorithm_of(kind())
    with pytest.raises(ConfigError, match="needs one factor a response; set --algorithm.off-policy.level sequence"):
        algorithm_of(kind(off_policy=OffPolicyConfig(mode="truncate")))


def test_a_class_without_a_record_is_refused() -> None:
    name = rf"{ChildConfig.__module__}:ChildConfig: 0 records of it in its module, expected one"
    with pytest.raises(ConfigError, match=name):
        algorithm_of(ChildConfig())


def test_two_records_of_one_class_are_refused(own_module: tuple[ModuleType, type[GRPOConfig]]) -> None:
    module, kind = own_module
    module.FIRST = replace(OWN, config=kind)  # type: ignore[attr-defined]
    module.SECOND = replace(OWN, config=kind)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="2 records of it in its module"):
        algorithm_of(kind())
