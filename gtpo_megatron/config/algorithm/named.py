"""Algorithms by name: ``GTPOConfig`` of this package, or ``module:Class`` or ``FILE.py:Class`` of anybody's."""

import dataclasses
import difflib

from gtpo_megatron.config.algorithm import ALGORITHMS
from gtpo_megatron.config.algorithm.base import AlgorithmConfig, penalty_ending_at
from gtpo_megatron.config.configuration import require_decorator
from gtpo_megatron.config.named_function import name_of, named_function
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import MAX_SHOWN, shown

CLOSE = 0.5
"""Least similarity of a name that is suggested; low, since the names end alike: GRPO means GRPOConfig."""


def algorithm_name(kind: type[AlgorithmConfig]) -> str:
    """What ``config.yaml`` calls the class."""
    return kind.__name__ if kind in ALGORITHMS else name_of(kind)


def algorithm_class(name: object) -> type[AlgorithmConfig]:
    """The configuration class called ``name``; a module that is named is imported.

    Raises:
        ConfigError: there is no such class, or it is no configuration of an algorithm.
    """
    known = {kind.__name__: kind for kind in ALGORITHMS}
    if name in known:
        return known[str(name)]
    if not isinstance(name, str) or ":" not in name:
        folded = {one.casefold(): one for one in known}
        close = difflib.get_close_matches(str(name)[:MAX_SHOWN].casefold(), folded, n=1, cutoff=CLOSE)
        raise ConfigError(
            f"algorithm {shown(name)}: must be module:Class or FILE.py:Class of your own, or one of {', '.join(known)}"
            + (f"; did you mean {folded[close[0]]}?" if close else "")
        )
    kind = named_function(name, what="algorithm", example="mine:RLOOConfig")
    if not (isinstance(kind, type) and issubclass(kind, AlgorithmConfig)):
        raise ConfigError(f"algorithm {name!r}: expected a subclass of AlgorithmConfig, got {kind!r}")
    require_decorator(kind)
    return kind


def default_algorithm(name: str, *, max_response_tokens: int) -> AlgorithmConfig:
    """The configuration called ``name`` with its defaults, for the command line.

    Args:
        name: name of the class, as in ``algorithm_class``.
        max_response_tokens: the recipe's limit, at which the ramp of a length penalty ends.

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
    algorithm = kind()
    penalty = penalty_ending_at(algorithm.length_penalty, max_response_tokens)
    return algorithm if penalty == algorithm.length_penalty else dataclasses.replace(algorithm, length_penalty=penalty)
