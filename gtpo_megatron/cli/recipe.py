"""Parses a recipe, ``module:function`` or ``FILE.py:function``, and overrides of its fields."""

import difflib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.config.algorithm.named import default_algorithm
from gtpo_megatron.config.configuration import configuration, unchecked
from gtpo_megatron.config.named_function import called, named_function
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import AnyConfig, load_any
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.errors import ConfigError


@configuration
class AnyRecipeOptions:
    """A recipe of a run or of a warm start, every field of which can be overridden.

    Commands with further options inherit from it or from one of the two below; the first line of their docstring is
    shown by ``--help``.

    Attributes:
        config: every field of the recipe can be overridden.
    """

    config: Annotated[AnyConfig, tyro.conf.arg(name="")]


@configuration
class RecipeOptions(AnyRecipeOptions):
    """A recipe, every field of which can be overridden.

    Attributes:
        config: every field of the recipe can be overridden.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]


@configuration
class SftRecipeOptions(AnyRecipeOptions):
    """The recipe of a warm start, every field of which can be overridden.

    Attributes:
        config: every field of the recipe can be overridden.
    """

    config: Annotated[SftConfig, tyro.conf.arg(name="")]


Options = TypeVar("Options", bound=AnyRecipeOptions)

HELP = ("-h", "--help")
EXAMPLE, SFT_EXAMPLE = "recipes.tiny_cpu:gtpo", "recipes.tiny_cpu:sft"

_ALGORITHM_HELP = (
    "--algorithm NAME takes another algorithm with its defaults: GSPOConfig, or a class of your own, module:Class or "
    "FILE.py:Class. A length penalty among them ends at the recipe's response limit."
)
_SECTION_HELP = "--help SECTION prints one of these sections, --help FIELD one field: algorithm, algorithm.alpha2."
_HEAD = re.compile(r"^ (?:(?P<section>[\w.-]+) )?options\n -+\n", re.MULTILINE)
"""Of a section of tyro's help without boxes; options of no section have one without a name."""
_FIELD = re.compile(r"^  (?:-h, )?--(?P<path>[a-z][\w.-]*).*\n(?:   .*\n)*", re.MULTILINE)


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
        load: finds the configuration that the first argument names; None: the recipe of the kind of the options.
        recipe: recipe of a command that has one of its own; empty: the first argument names it.

    Raises:
        ConfigError: the recipe is missing or cannot be loaded, or an option cannot be used.
    """
    program = f"{program} {command}".strip()
    if not recipe:
        if arguments and arguments[0] in HELP:
            sys.stdout.write(_overview(options, program))
            sys.exit(0)
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError(f"{command or program} needs a recipe first: {program} {_example(options)}")
        recipe, arguments = arguments[0], arguments[1:]
        program = f"{program} {recipe}"
    config = (load or _loader(options))(recipe)
    name, others = _take_algorithm(arguments)
    if name is not None:
        if isinstance(config, SftConfig):
            raise ConfigError(f"--algorithm {name}: a warm start has none; it learns what is given")
        algorithm = default_algorithm(name, max_response_tokens=config.rollout.sampling.max_response_tokens)
        config = unchecked(config, algorithm=algorithm)  # the options may make it fit
    default = options(config=config)  # as its kind was loaded
    after_help = next((others[place + 1 : place + 2] for place, other in enumerate(others) if other in HELP), [])
    if topic := next(filter(_names_topic, after_help), ""):
        sys.stdout.write(_on_topic(_sections(options, default, program), topic))
        sys.exit(0)
    about = _SECTION_HELP if isinstance(config, SftConfig) else f"{_SECTION_HELP}\n{_ALGORITHM_HELP}"
    return parse_options(options, others, program=program, default=default, description=about)


def _names_topic(argument: str) -> bool:
    """A section or a field, ``algorithm`` or ``--algorithm.alpha2``, rather than another option."""
    return not argument.startswith("-") or "." in argument


def _sections(options: type[Options], default: Options, program: str) -> dict[str, str]:
    """Name of each section -> its part of what tyro prints for ``--help`` where it draws no boxes."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        parse_options(options, ["--help"], program=program, default=default)
    text = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head["section"] or "": text[head.start() : end] for head, end in zip(heads, ends, strict=True)}


def _on_topic(sections: Mapping[str, str], topic: str) -> str:
    """The sections of a name and those within them, or the field of that name.

    Raises:
        ConfigError: there is no such section or field.
    """
    path = topic.removeprefix("--").replace("_", "-")
    found = [text for name, text in sections.items() if name == path or name.startswith(f"{path}.")]
    if found:
        return "".join(found)
    fields = {field["path"]: field[0] for text in sections.values() for field in _FIELD.finditer(text)}
    named = [text for name, text in fields.items() if path in (name, name.rpartition(".")[2])]
    if not named:
        names = list(filter(None, sections))
        close = difflib.get_close_matches(path, [*names, *fields], n=1)
        hint = f"did you mean {close[0]}?" if close else f"the sections are {', '.join(names)}"
        raise ConfigError(f"--help {topic}: no such section or field; {hint}")
    return "".join(named)


def _overview(options: type[Options], program: str) -> str:
    """Help without a recipe: how to see its fields, and the command's own options."""
    is_supervised, example = issubclass(options, SftRecipeOptions), _example(options)
    config = _loader(options)(example)
    sections = _sections(options, options(config=config), program)
    names = ", ".join(name for name in sections if name and "." not in name)
    section, field, value = ("data", "rows-per-step", "16") if is_supervised else ("algorithm", "alpha2", "0.05")
    return (
        f"usage: {program} RECIPE [OPTIONS]\n\n"
        "RECIPE is module:function, FILE.py:function, or the config.yaml of a run.\n\n"
        f"Every field of the recipe is an option, --num-steps 200 or --{section}.{field} {value}:\n"
        f"  {program} {example} --help                    all of them\n"
        f"  {program} {example} --help {section}          those of one section\n"
        f"  {program} {example} --help {section}.{field}   one of them\n"
        f"Sections: {names}.\n{'' if is_supervised else _ALGORITHM_HELP}\n\n{sections['']}"
    )


def _example(options: type[Options]) -> str:
    return SFT_EXAMPLE if issubclass(options, SftRecipeOptions) else EXAMPLE


def _loader(options: type[Options]) -> Callable[[str], AnyConfig]:
    """What loads the recipes that these options take."""
    if issubclass(options, SftRecipeOptions):
        return load_sft_recipe
    return load_recipe if issubclass(options, RecipeOptions) else load_any_recipe


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
    config = _load(name, example=EXAMPLE)
    if isinstance(config, SftConfig):
        raise ConfigError(f"recipe {name!r} is of a warm start; start it by: gtpo-megatron sft {name}")
    if not isinstance(config, RunConfig):
        raise ConfigError(f"recipe {name!r} returned {type(config).__name__}, expected a RunConfig")
    return config


def load_sft_recipe(name: str) -> SftConfig:
    """The same of a warm start.

    Raises:
        ConfigError: no such module, function or file, or it does not give an SftConfig.
    """
    config = _load(name, example=SFT_EXAMPLE)
    if isinstance(config, RunConfig):
        raise ConfigError(f"recipe {name!r} is of a run and no warm start; start it by: gtpo-megatron train {name}")
    if not isinstance(config, SftConfig):
        raise ConfigError(f"recipe {name!r} returned {type(config).__name__}, expected an SftConfig")
    return config


def load_any_recipe(name: str) -> AnyConfig:
    """The same of a run or of a warm start.

    Raises:
        ConfigError: no such module, function or file, or it gives neither.
    """
    config = _load(name, example=EXAMPLE)
    if not isinstance(config, RunConfig | SftConfig):
        raise ConfigError(f"recipe {name!r} returned {type(config).__name__}, expected a RunConfig or an SftConfig")
    return config


def _load(name: str, *, example: str) -> object:
    if name.endswith((".yaml", ".yml")):
        return load_any(Path(name))
    return called(named_function(name, what="recipe", example=example), name, what="recipe")
