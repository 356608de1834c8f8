"""A value of the wrong type is refused by every configuration, in the same words."""

import dataclasses
import importlib
import pickle
import pkgutil
import re
from typing import Literal, get_origin, get_type_hints

import pytest

from gtpo_megatron import config
from gtpo_megatron.config.algorithm import ALGORITHMS, DrGRPOConfig, GTPOConfig
from gtpo_megatron.config.algorithm.base import NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.model import BalanceConfig, ModelConfig
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            GTPOConfig,
            {"entropy_clip": (0, 1, 2)},
            r"entropy_clip=\(0, 1, 2\): got tuple, expected tuple\[float, float\] \| None",
        ),
        (GTPOConfig, {"entropy_clip": [0.1, 2.0]}, r"entropy_clip=\[0.1, 2.0\]: got list"),
        (GTPOConfig, {"alpha2": None}, "alpha2=None: got NoneType, expected float"),
        (GTPOConfig, {"alpha1": True}, "alpha1=True: got bool, expected float"),
        (GTPOConfig, {"kappa": "4"}, r"kappa='4': got str, expected float \| None"),
        (GTPOConfig, {"formulation": ["v1"]}, r"formulation=\['v1'\]: must be one of 'v1', 'v1_clipped'"),
        (GTPOConfig, {"std_ddof": True}, "std_ddof=True: got bool, expected int"),
        (GTPOConfig, {"off_policy": "mask"}, "off_policy='mask': got str, expected OffPolicyConfig"),
        (
            GTPOConfig,
            {"length_penalty": None},
            r"length_penalty=None: got NoneType, expected NoLengthPenalty \| SoftOverlong",
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


@configuration
class Odd:
    pairs: tuple[tuple[str, int], ...] = ()
    answer: Literal["1", "2"] | None = None
    either: int | float = 0


def test_nested_annotations() -> None:
    assert Odd(pairs=(("a", 1), ("b", 2)), answer="1", either=2).pairs == (("a", 1), ("b", 2))
    assert isinstance(Odd(either=2).either, int)
    for bad in ({"pairs": (("a", 1.5),)}, {"pairs": (("a",),)}, {"answer": True}, {"answer": 1.0}, {"either": "2"}):
        with pytest.raises(ConfigError):
            Odd(**bad)


def is_class_of_fields(value: object) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def config_classes() -> list[type]:
    modules = [importlib.import_module(f"{config.__name__}.{m.name}") for m in pkgutil.iter_modules(config.__path__)]
    found = {kind for module in modules for kind in vars(module).values() if is_class_of_fields(kind)}
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


def test_a_default_that_is_another_keeps_the_bounds_of_its_base() -> None:
    """Only what ``get_type_hints`` says of a class itself is checked, so a bound must stand in both."""
    for kind in ALGORITHMS:
        hints = get_type_hints(kind, include_extras=True)
        for base in kind.__mro__[1:-1]:
            for name, hint in get_type_hints(base, include_extras=True).items():
                assert hints[name] == hint or get_origin(hint) is Literal, f"{kind.__name__}.{name}"


def test_an_unknown_and_a_missing_field_are_one_line() -> None:
    with pytest.raises(ConfigError, match="^unknown key 'alpha_1' in GTPOConfig; perhaps you meant 'alpha1'$"):
        GTPOConfig(alpha_1=1.0)
    with pytest.raises(ConfigError, match="^unknown key 'alpha_1' in GTPOConfig; perhaps you meant 'alpha1'$"):
        dataclasses.replace(GTPOConfig(), alpha_1=1.0)
    with pytest.raises(ConfigError, match="^ModelConfig lacks path$"):
        ModelConfig()


def test_an_error_of_a_class_keeps_its_cause() -> None:
    with pytest.raises(ConfigError, match="is no regular expression") as error:
        GTPOConfig(unshaped_patterns=("(",))
    assert isinstance(error.value.__cause__, re.error)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardConfig(GTPOConfig):
    strength: float = 1.0


def test_a_run_checks_the_fields_of_an_algorithm_that_is_a_plain_dataclass() -> None:
    with pytest.raises(ConfigError, match=r"strength='x': got str, expected float"):
        dataclasses.replace(tiny_cpu.gtpo(), algorithm=StandardConfig(strength="x"))


def test_a_configuration_survives_pickling() -> None:
    config = tiny_cpu.gtpo()
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert repr(again) == repr(config)
    assert hash(again.rollout) == hash(config.rollout)


def test_everything_is_off():
    BalanceConfig().check_model(has_experts=False, has_bias=False)
    assert not BalanceConfig().has_penalties


@pytest.mark.parametrize("name", ["aux_loss_coef", "z_loss_coef", "bias_update_rate"])
def test_a_dense_model_and_negative_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=rf"balance.{name}=0.1: the model is dense; set it to 0"):
        BalanceConfig(**{name: 0.1}).check_model(has_experts=False, has_bias=False)
    with pytest.raises(ConfigError, match=rf"{name}=-0.1: must be greater than or equal to 0"):
        BalanceConfig(**{name: -0.1})


def test_biases_that_are_not_there_are_not_updated():
    BalanceConfig(aux_loss_coef=0.1).check_model(has_experts=True, has_bias=False)
    BalanceConfig(bias_update_rate=0.1).check_model(has_experts=True, has_bias=True)
    with pytest.raises(ConfigError, match="balance.bias_update_rate=0.1: the experts of this model have no biases"):
        BalanceConfig(bias_update_rate=0.1).check_model(has_experts=True, has_bias=False)
