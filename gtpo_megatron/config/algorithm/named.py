"""Algorithms by name: ``GTPOConfig`` of this package, or ``module:Class`` of anybody's."""

import dataclasses
import importlib

from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.algorithm.base import AlgorithmConfig
from gtpo_megatron.errors import ConfigError


def algorithm_name(kind: type[AlgorithmConfig]) -> str:
    """What ``config.yaml`` calls the class."""
    return kind.__name__ if kind in ALGORITHMS else f"{kind.__module__}:{kind.__qualname__}"


def algorithm_class(name: object) -> type[AlgorithmConfig]:
    """The configuration class called ``name``; a module that is named is imported.

    Raises:
        ConfigError: there is no such class, or it is no configuration of an algorithm.
    """
    known = {kind.__name__: kind for kind in ALGORITHMS}
    if name in known:
        return known[str(name)]
    module_name, colon, class_name = str(name).partition(":")
    if not (isinstance(name, str) and colon and module_name and class_name):
        raise ConfigError(f"algorithm {name!r}: must be module:Class of your own, or one of {', '.join(known)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module: whatever it raises, the sentence names it
        raise ConfigError(
            f"algorithm {name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, AlgorithmConfig)):
        own = [key for key, value in vars(module).items() if _is_algorithm(value) and value.__module__ == module_name]
        raise ConfigError(
            f"algorithm {name!r}: {module_name} has no subclass {class_name} of AlgorithmConfig; it has "
            f"{', '.join(own) or 'none'}"
        )
    if "__dataclass_params__" not in vars(kind) or not dataclasses.fields(kind):
        raise ConfigError(
            f"algorithm {name!r}: the class lacks @dataclass(frozen=True, kw_only=True, slots=True), so its fields "
            "would be ignored"
        )
    return kind


def default_algorithm(name: str) -> AlgorithmConfig:
    """The configuration called ``name`` with its defaults, for the command line.

    Raises:
        ConfigError: see ``algorithm_class``; or a field has no default.
    """
    kind = algorithm_class(name)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"algorithm {name!r}: {', '.join(missing)} without a default; give every field one")
    return kind()


def _is_algorithm(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, AlgorithmConfig)
