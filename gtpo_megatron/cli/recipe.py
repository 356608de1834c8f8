"""Parses a recipe, ``module:function`` or ``FILE.py:function``, and overrides of its fields."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.config.algorithm.named import default_algorithm
from gtpo_megatron.config.named_function import called, named_function
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """A recipe, every field of which can be overridden.

    Commands with further options inherit from it; the first line of their docstring is shown by ``--help``.

    Attributes:
        config: every field of the recipe can be overridden.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]


Options = TypeVar("Options", bound=RecipeOptions)

_ALGORITHM_HELP = (
    "--algorithm NAME takes another algorithm with its defaults: GSPOConfig, or a class of your own, module:Class or "
    "FILE.py:Class."
)


def parse(
    command: str,
    options: type[Options],
    arguments: Sequence[str],
    *,
    program: str = "gtpo-megatron",
    load: Callable[[str], RunConfig] | None = None,
) -> Options:
    """``RECIPE [options]``; exits with status 0 after printing help.

    Args:
        command: subcommand; empty if the program has none.
        options: the class of options to parse.
        arguments: the arguments after the command.
        program: name shown in help and errors.
        load: finds the configuration that the first argument names; None: :func:`load_recipe`.

    Raises:
        ConfigError: the recipe is missing or cannot be loaded, or an option cannot be used.
    """
    program = f"{program} {command}".strip()
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            f"usage: {program} RECIPE [options]\n\n"
            "RECIPE is module:function, FILE.py:function, or the config.yaml of a run; "
            f"{program} recipes.tiny_cpu:gtpo --help lists every field.\n"
            f"{_ALGORITHM_HELP}\n"
        )
        sys.exit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command or program} needs a recipe first: {program} recipes.tiny_cpu:gtpo")
    config = (load or load_recipe)(arguments[0])
    name, others = _take_algorithm(arguments[1:])
    if name is not None:
        config = replace(config, algorithm=default_algorithm(name))
    return parse_options(
        options,
        others,
        program=f"{program} {arguments[0]}",
        default=options(config=config),
        description=f"{(options.__doc__ or '').strip().splitlines()[0]}\n\n{_ALGORITHM_HELP}",
    )


def _take_algorithm(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits ``--algorithm NAME`` from the other arguments."""
    others: list[str] = []
    name, rest = None, iter(arguments)
    for argument in rest:
        if argument == "--algorithm":
            name = next(rest, "")
        elif argument.startswith("--algorithm="):
            name = argument.partition("=")[2]
        else:
            others.append(argument)
    return name, others


def load_recipe(name: str) -> RunConfig:
    """Calls the recipe ``module:function`` or ``FILE.py:function``, or reads a ``.yaml`` configuration.

    Raises:
        ConfigError: no such module, function or file, or it does not give a RunConfig.
    """
    if name.endswith((".yaml", ".yml")):
        return load_config(Path(name))
    recipe = named_function(name, what="recipe", example="recipes.tiny_cpu:gtpo")
    config = called(recipe, name, what="recipe")
    if not isinstance(config, RunConfig):
        raise ConfigError(f"recipe {name!r} returned {type(config).__name__}, expected a RunConfig")
    return config
