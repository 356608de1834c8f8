"""Parses command-line options with tyro, whose help, errors and suggestions are printed as they are."""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

import tyro

from gtpo_megatron.cli.reader import exit_when_pipe_closes
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import shown

Options = TypeVar("Options")

EXIT_USAGE = 2
"""Status of a mistake in what was typed or configured; tyro has the same."""

_MAPPINGS = tyro.constructors.ConstructorRegistry()


def parse_options(
    kind: type[Options],
    arguments: Sequence[str],
    *,
    program: str,
    default: Options | None = None,
    description: str | None = None,
) -> Options:
    """Fills in a dataclass of options; exits with status 0 after printing help, with 2 after an error of tyro's.

    A list that is given several times has the values of all; any other option has its last value.

    Args:
        kind: the dataclass, or a union of dataclasses, one per subcommand.
        arguments: the arguments after the program's name.
        program: name shown in help and errors.
        default: defaults of the options; None: those of ``kind``.
        description: text of the help; None: the docstring of ``kind``.

    Raises:
        ConfigError: ``kind`` itself refuses the values; an error of a dataclass within it is tyro's.
    """
    with exit_when_pipe_closes(), warnings.catch_warnings():
        # tyro compares defaults with their annotations, and does not know the name of pydantic's type of JSON values
        warnings.filterwarnings("ignore", message="Skipping type check against 'JsonValue'")
        return tyro.cli(
            kind,
            prog=program,
            args=_joined(arguments, set(_lists(kind if default is None else default))),
            description=description,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.PositionalMetavarFromFieldName),
            default=tyro.MISSING_NONPROP if default is None else default,
            registry=_MAPPINGS,
        )


def options_or_exit(
    kind: type[Options], arguments: Sequence[str], *, program: str, description: str | None = None
) -> Options:
    """:func:`parse_options` for a separate script: writes an error to stderr and exits with status 2."""
    try:
        return parse_options(kind, arguments, program=program, description=description)
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(EXIT_USAGE)


def _joined(arguments: Sequence[str], lists: set[str]) -> list[str]:
    """``--env A=1 --env B=2`` as ``--env A=1 B=2``, since tyro would keep the last one alone."""
    groups: dict[str, list[str]] = {"": []}
    for number, argument in enumerate(arguments):
        flag, has_value, value = argument.partition("=")
        if not flag.startswith("--"):
            groups[list(groups)[-1]].append(argument)
        elif (name := flag.replace("_", "-")) in lists:
            groups[name] = [*groups.pop(name, [flag]), *([value] if has_value else [])]
        else:
            groups[f"{number}"] = [argument]
    return [argument for group in groups.values() for argument in group]


def _lists(options: Any, parent: str = "--") -> Iterator[str]:
    """Names of the options that are lists, of a class of options or an object of one."""
    if not is_dataclass(options):
        return
    hints = get_type_hints(options if isinstance(options, type) else type(options))
    for field in fields(options):
        inner = hints[field.name] if isinstance(options, type) else getattr(options, field.name)
        # ``config`` of commands that take a recipe has no name on the command line
        path = parent if field.name == "config" and parent == "--" else f"{parent}{field.name.replace('_', '-')}"
        if get_origin(hints[field.name]) is tuple:
            yield path
        yield from _lists(inner, path if path == parent else f"{path}.")


@_MAPPINGS.primitive_rule
def _json_object(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """A mapping is JSON; tyro would take each of its keys for an option."""
    if get_origin(info.type) is not Mapping:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_mapping_of,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _mapping_of(words: list[str]) -> dict[str, object]:
    found = parse_json(words[0], "it", error=ConfigError)
    if not isinstance(found, dict):
        raise ConfigError(f"it is {shown(found)}; expected an object")
    return found
