"""Algorithms by name: of the package, and of anybody's file."""

import dataclasses
import sys

import pytest

from gtpo_megatron.cli.recipe import RecipeOptions, parse
from gtpo_megatron.config.algorithm import ALGORITHMS, GSPOConfig
from gtpo_megatron.config.algorithm.named import algorithm_class, algorithm_name
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu
from tests.yaml_text import from_yaml

OWN = """
from dataclasses import dataclass
from gtpo_megatron.config.algorithm import AlgorithmConfig, GTPOConfig
from gtpo_megatron.config.configuration import configuration

@configuration
class OwnConfig(AlgorithmConfig):
    strength: float = 1.0

@configuration
class NeedyConfig(AlgorithmConfig):
    strength: float

@dataclass(frozen=True, kw_only=True, slots=True)
class StandardConfig(AlgorithmConfig):
    strength: float = 1.0

    def __post_init__(self):
        AlgorithmConfig.__post_init__(self)

class PlainConfig(GTPOConfig):
    strength: float = 1.0

class Another:
    pass
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    (tmp_path / "broken_algorithm.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_algorithm"
    sys.modules.pop("own_algorithm", None)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_class_of_the_package_has_its_own_name(kind):
    assert algorithm_class(algorithm_name(kind)) is kind


@pytest.mark.parametrize("name", ["OwnConfig", "StandardConfig"])
def test_one_of_a_users_file_is_written_and_read_back(own_module, name):
    options = parse(
        "config",
        RecipeOptions,
        ["recipes.tiny_cpu:gtpo", "--algorithm", f"{own_module}:{name}", "--algorithm.strength", "0.25"],
    )
    algorithm = options.config.algorithm
    assert (type(algorithm).__name__, algorithm.strength) == (name, 0.25)
    text = to_yaml(options.config)
    assert f"kind: own_algorithm:{name}" in text
    assert from_yaml(text) == options.config
    with pytest.raises(ConfigError, match=f"unknown key 'strengthh' in {name}; perhaps you meant 'strength'"):
        from_yaml(text.replace("strength:", "strengthh:"))
    with pytest.raises(ConfigError, match="strength='much': got str, expected float"):
        from_yaml(text.replace("strength: 0.25", "strength: much"))


def test_the_fields_of_a_standard_dataclass_are_checked_by_the_run(own_module):
    kind = algorithm_class(f"{own_module}:StandardConfig")
    config = tiny_cpu.gtpo()
    exact = dataclasses.replace(config, algorithm=kind(strength=1)).algorithm
    assert (type(exact), exact.strength, type(exact.strength)) == (kind, 1.0, float)
    for wrong in ({"strength": "1"}, {"strength": float("nan")}, {"std_eps": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            dataclasses.replace(config, algorithm=kind(**wrong))


@pytest.mark.parametrize("argument", [["--algorithm", "GSPOConfig"], ["--algorithm=GSPOConfig"]])
def test_one_of_the_package_on_the_command_line(argument):
    options = parse("config", RecipeOptions, ["recipes.tiny_cpu:gtpo", *argument, "--algorithm.clip-eps-low", "0.001"])
    assert options.config.algorithm == GSPOConfig(clip_eps_low=0.001)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_algorithm:Missing", "own_algorithm lacks it; it has .*OwnConfig"),
        ("own_algorithm:Another", "expected a subclass of AlgorithmConfig, got <class"),
        ("own_algorithm:PlainConfig", r"own_algorithm:PlainConfig lacks @configuration"),
        ("own_algorithm:NeedyConfig", "strength without a default"),
        ("broken_algorithm:X", "importing broken_algorithm failed: ZeroDivisionError: division by zero"),
        ("no_such_module:X", "there is no module 'no_such_module' on the module path"),
        ("gtpo", "must be module:Class or FILE.py:Class of your own, or one of GTPOConfig"),
        (":X", "must be written module:function"),
        ("", "must be module:Class"),
    ],
)
def test_what_is_none_is_one_line(own_module, name, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse("config", RecipeOptions, ["recipes.tiny_cpu:gtpo", "--algorithm", name])
    assert "\n" not in str(error.value)


def test_a_run_folder_whose_module_is_gone_says_so(own_module):
    text = to_yaml(dataclasses.replace(parse("c", RecipeOptions, ["recipes.tiny_cpu:gtpo"]).config))
    text = text.replace("kind: GTPOConfig", "kind: gone_module:OwnConfig")
    with pytest.raises(
        ConfigError, match=r"config\.yaml: algorithm\.kind: algorithm 'gone_module:OwnConfig': there is no module"
    ):
        from_yaml(text)
