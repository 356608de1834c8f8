"""A value of the wrong type is refused by every configuration, in the same words."""

import dataclasses
import importlib
import pkgutil
from typing import Literal

import pytest

from gtpo_megatron import config
from gtpo_megatron.config.algorithm import ALGORITHMS, DrGRPOConfig, GTPOConfig
from gtpo_megatron.config.algorithm.length_penalty import NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.config.checks import require_types
from gtpo_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            GTPOConfig,
            {"entropy_clip": (0, 1, 2)},
            r"\(0, 1, 2\): got tuple, expected \(float, float\) or None",
        ),
        (GTPOConfig, {"entropy_clip": [0.1, 2.0]}, r"entropy_clip=\[0.1, 2.0\]: got list"),
        (GTPOConfig, {"alpha2": None}, "alpha2=None: got NoneType, expected float"),
        (GTPOConfig, {"alpha1": True}, "alpha1=True: got bool, expected float"),
        (GTPOConfig, {"kappa": "4"}, "kappa='4': got str, expected float or None"),
        (GTPOConfig, {"formulation": ["v1"]}, r"formulation=\['v1'\]: must be one of 'v1', 'v1_clipped'"),
        (GTPOConfig, {"std_ddof": True}, "std_ddof=True: got bool, expected int"),
        (GTPOConfig, {"off_policy": "mask"}, "off_policy='mask': got str, expected OffPolicyConfig"),
        (
            GTPOConfig,
            {"length_penalty": None},
            "got NoneType, expected NoLengthPenalty or SoftOverlong",
        ),
        (SoftOverlongPenalty, {"max_tokens": 4096.5}, "max_tokens=4096.5: got float, expected int"),
        (DrGRPOConfig, {"norm_tokens": "x"}, "norm_tokens='x': got str, expected int"),
    ],
)
def test_got_and_expected(kind: type, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


def test_an_integer_becomes_the_float_it_stands_for() -> None:
    one = GTPOConfig(formulation="v2", alpha1=1, alpha2=0, kappa=None, entropy_clip=(0, 2), std_ddof=1)
    other = GTPOConfig(formulation="v2", alpha1=1.0, alpha2=0.0, kappa=None, entropy_clip=(0.0, 2.0), std_ddof=1)
    assert repr(one) == repr(other)  # what ranks compare
    assert isinstance(one.std_ddof, int)
    assert repr(GTPOConfig(dual_clip=3)) == repr(GTPOConfig(dual_clip=3.0))


@dataclasses.dataclass(frozen=True, slots=True)
class Odd:
    pairs: tuple[tuple[str, int], ...] = ()
    answer: Literal[1, "1"] | None = None
    either: int | float = 0


def test_nested_annotations() -> None:
    require_types(Odd(pairs=(("a", 1), ("b", 2)), answer="1", either=2))
    assert isinstance(Odd(either=2).either, int)
    for bad in ({"pairs": (("a", 1.5),)}, {"pairs": (("a",),)}, {"answer": True}, {"answer": 1.0}, {"either": "2"}):
        with pytest.raises(ConfigError):
            require_types(Odd(**bad))


def config_classes() -> list[type]:
    modules = [importlib.import_module(f"{config.__name__}.{m.name}") for m in pkgutil.iter_modules(config.__path__)]
    found = {kind for module in modules for kind in vars(module).values() if dataclasses.is_dataclass(kind)}
    return sorted((kind for kind in found if kind.__name__.endswith(("Config", "Penalty"))), key=lambda k: k.__name__)


class Nothing:
    """Fits no annotation."""


@pytest.mark.parametrize("kind", config_classes(), ids=lambda kind: kind.__name__)
def test_every_field_of_every_configuration_is_checked(kind: type) -> None:
    if kind is NoLengthPenalty:
        assert not dataclasses.fields(kind)
    for field in dataclasses.fields(kind):
        others = {one.name: Nothing() for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
        with pytest.raises(ConfigError, match="(got Nothing, expected|must be one of)"):
            kind(**others | {field.name: Nothing()})


def test_every_algorithm_is_among_them() -> None:
    assert set(ALGORITHMS) <= set(config_classes())
