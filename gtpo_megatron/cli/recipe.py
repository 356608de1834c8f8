"""Parses a recipe, ``module:function`` or ``FILE.py:function``, and overrides of its fields."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.field_help import attribute_texts, help_text
from gtpo_megatron.cli.reader import reader_may_leave
from gtpo_megatron.config.algorithm.named import default_algorithm
from gtpo_megatron.config.configuration import configuration, unchecked
from gtpo_megatron.config.named_function import called, named_function
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError


@configuration
class RecipeOptions:
    """A recipe, every field of which can be overridden.

    Commands with further options inherit from it; the first line of their docstring is shown by ``--help``.

    Attributes:
        config: every field of the recipe can be overridden.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]


Options = TypeVar("Options", bound=RecipeOptions)

HELP = ("-h", "--help")
EXAMPLE = "recipes.tiny_cpu:gtpo"

_ALGORITHM_HELP = (
    "--algorithm NAME takes another algorithm with its defaults: GSPOConfig, or a class of your own, module:Class or "
    "FILE.py:Class. A length penalty among them ends at the recipe's response limit."
)


def parse(
    command: str,
    options: type[Options],
    arguments: Sequence[str],
    *,
    program: str = "gtpo-megatron",
    load: Callable[[str], RunConfig] | None = None,
    recipe: str = "",
) -> Options:
    """``RECIPE [options]``; exits with status 0 after printing help.

    ``--help`` may be followed by the name of a section or a field.

    Args:
        command: subcommand; empty if the program has none.
        options: the class of options to parse.
        arguments: the arguments after the command.
        program: name shown in help and errors.
        load: finds the configuration that the first argument names; None: :func:`load_recipe`.
        recipe: of a command that has one of its own; empty: the first argument names it.

    Raises:
        ConfigError: the recipe is missing or cannot be loaded, or an option cannot be used.
    """
    program = f"{program} {command}".strip()
    if not recipe:
        if arguments and arguments[0] in HELP:
            _show(_overview(options, program))
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError(f"{command or program} needs a recipe first: {program} {EXAMPLE}")
        recipe, arguments = arguments[0], arguments[1:]
        program = f"{program} {recipe}"
    config = (load or load_recipe)(recipe)
    name, others = _take_algorithm(arguments)
    if name is not None:
        algorithm = default_algorithm(name, max_response_tokens=config.rollout.sampling.max_response_tokens)
        config = unchecked(config, algorithm=algorithm)  # the options may make it fit
    default = options(config=config)
    if asked := [place for place, other in enumerate(others) if other in HELP]:
        topic = next((other for other in others[asked[0] + 1 : asked[0] + 2] if _names_topic(other)), "")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        _show(help_text(default, program=program, about=_ALGORITHM_HELP, topic=topic, width=width) + "\n")
    return parse_options(options, others, program=program, default=default)


def _show(text: str) -> NoReturn:
    with reader_may_leave():
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.exit(0)


def _names_topic(argument: str) -> bool:
    """A section or a field, ``algorithm`` or ``--algorithm.alpha2``, rather than another option."""
    return not argument.startswith("-") or "." in argument


def _overview(options: type[RecipeOptions], program: str) -> str:
    """Help without a recipe: how to see its fields, and the command's own options."""
    texts = attribute_texts(options)
    names = [field.name for field in fields(options) if field.name != "config"]
    own = [(f"--{name.replace('_', '-')}", texts[name]) for name in names]
    width = max((len(flag) for flag, _ in own), default=0)
    sections = ", ".join(field.name for field in fields(RunConfig) if field.name not in ("name", "num_steps", "seed"))
    return (
        f"usage: {program} RECIPE [options]\n\n"
        "RECIPE is module:function, FILE.py:function, or the config.yaml of a run.\n\n"
        f"Every field of the recipe is an option, --num-steps 200 or --algorithm.alpha2 0.05:\n"
        f"  {program} {EXAMPLE} --help                    lists every field, a line each\n"
        f"  {program} {EXAMPLE} --help algorithm          the fields of one section\n"
        f"  {program} {EXAMPLE} --help algorithm.alpha2   everything about one\n"
        f"Sections: {sections}.\n{_ALGORITHM_HELP}\n"
        + "".join(f"\n  {flag:<{width}}  {text}" for flag, text in own)
        + ("\n" if own else "")
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
