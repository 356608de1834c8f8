"""Parses command-line options; an error is one line that suggests similar options."""

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
from tyro._errors import (
    BadValue,
    InstantiationFailure,
    InvalidChoice,
    MissingArgs,
    MissingSubcommand,
    ParseErrorEvent,
    UnrecognizedArgs,
    on_parse_error,
)

from gtpo_megatron.cli.reader import reader_may_leave
from gtpo_megatron.config.checks import require_types
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import printable, shown

Options = TypeVar("Options")

EXIT_USAGE = 2

_TRUTH = {"true": True, "false": False}

_MARKUP = re.compile(r"\[/?bold\]")

SHOWN_CHARACTERS = 200
"""Of a quoted argument in a message."""

_POSITIONAL = get_args(tyro.conf.Positional[str])[-1]
"""tyro's mark of an argument without a flag."""

CLOSE = 0.6
"""Least similarity of the last name for an option to be suggested."""
CLOSE_WHOLE = 0.9
"""Least similarity of the whole path; higher, because options share most of it with their siblings."""


def parse_options(
    kind: type[Options],
    arguments: Sequence[str],
    *,
    program: str,
    default: Options | None = None,
    description: str | None = None,
) -> Options:
    """Fills in a dataclass of options; exits with status 0 after printing help.

    Args:
        kind: the dataclass, or a union of dataclasses, one per subcommand.
        arguments: the arguments after the program's name.
        program: name shown in help and errors.
        default: defaults of the options; None: those of ``kind``.
        description: text of the help; None: the docstring of ``kind``.

    Raises:
        ConfigError: an option is unknown, missing, of another type or out of its bounds.
    """
    options = kind if default is None else default
    flags = flags_of(options)

    def refuse(event: ParseErrorEvent) -> None:
        raise ConfigError(_sentence(event, arguments, flags))

    is_one = len(_kinds(kind)) == 1
    with reader_may_leave(), on_parse_error(refuse):
        found: Options = tyro.cli(
            kind,
            prog=program,
            args=_spelled_for_tyro(arguments, options),
            description=description,
            config=(tyro.conf.AvoidSubcommands,) if is_one else (),
            default=tyro.MISSING_NONPROP if default is None else default,
        )
    require_types(found)
    return found


def options_or_exit(
    kind: type[Options], arguments: Sequence[str], *, program: str, description: str | None = None
) -> Options:
    """:func:`parse_options` for a separate script: writes an error to stderr and exits with status 2."""
    try:
        return parse_options(kind, arguments, program=program, description=description)
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(EXIT_USAGE)


def _sentence(event: ParseErrorEvent, arguments: Sequence[str], flags: Sequence[str]) -> str:
    """The error message, one line."""
    if isinstance(event, UnrecognizedArgs):
        return _unknown(event.tokens, flags)
    if isinstance(event, MissingArgs):
        names = ", ".join(_name(missing.arg) for missing in event.missing_arguments)
        unknown = f"; {_unknown(event.unrecognized_tokens, flags)}" if event.unrecognized_tokens else ""
        return f"{names} is missing{unknown}; --help says what it is"
    if isinstance(event, MissingSubcommand):
        known = ", ".join(event.subcommand_spec.parser_from_name)
        found = "no command" if event.found_token is None else f"no command {shown(event.found_token)}"
        return f"{found}; there are {known}"
    if isinstance(event, InvalidChoice):
        return f"{_name(event.argument)} {_cut(event.value)}: must be one of {', '.join(event.choices)}"
    if isinstance(event, BadValue):
        return f"{_name(event.argument)}: lacks its value, or has one that it cannot take"
    if isinstance(event, InstantiationFailure):
        return _not_built(event, arguments)
    return _cut(f"{type(event).__name__}: {event}")  # an event that this version of tyro does not have


def _unknown(tokens: Sequence[str], flags: Sequence[str]) -> str:
    unknown = next((token for token in tokens if token.startswith("-")), tokens[0]).partition("=")[0]
    if not unknown.startswith("-"):
        return f"unknown argument {shown(unknown)}; --help lists what can be given"
    given = unknown.replace("_", "-")
    last = given.lstrip("-").rpartition(".")[2]
    off = _turned_off(given.removeprefix("--no-"))
    meant = [off] if off in flags else difflib.get_close_matches(given, flags, n=1, cutoff=CLOSE_WHOLE)
    if not meant:  # the same name under another parent, or without a parent
        names = [flag.lstrip("-").rpartition(".")[2] for flag in flags]
        similar = difflib.get_close_matches(last, names, n=1, cutoff=CLOSE)
        named = [flag for flag, name in zip(flags, names, strict=True) if name in similar]
        meant = difflib.get_close_matches(given, named, n=3, cutoff=0.0)
    hint = f"; did you mean {' or '.join(meant)}?" if meant else "; --help lists all options"
    return f"unknown option {_cut(unknown)}{hint}"


def _not_built(event: InstantiationFailure, arguments: Sequence[str]) -> str:
    message = _cut(_MARKUP.sub("", event.message), 8 * SHOWN_CHARACTERS)  # our own messages quote only what they need
    if event.argument is not None:
        kind = event.argument.lowered.metavar
        return f"{_name(event.argument)}: {message}; expected {kind}"
    # one of our own checks: its message has the field's name without the path
    field = message.partition("=")[0].strip().replace("_", "-")
    given = [token.partition("=")[0] for token in arguments if token.startswith("--")]
    where = [flag for flag in given if flag.replace("_", "-").rpartition(".")[2].lstrip("-") == field and "." in flag]
    return f"{where[0]}: {message}" if where else message


def _name(argument: Any) -> str:
    """The flag of an option, or the upper-case name of a positional argument."""
    lowered = argument.lowered
    return str(argument.field.intern_name).upper() if argument.is_positional() else str(lowered.name_or_flags[0])


def _cut(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    line = printable(text)
    return line if len(line) <= characters else f"{line[:characters]}..."


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The dataclasses of a union, annotated or not."""
    if get_args(kind):
        return tuple(one for arm in get_args(kind) for one in _kinds(arm))
    return (kind,) if isinstance(kind, type) and is_dataclass(kind) else ()


def flags_of(options: Any) -> list[str]:
    """Every flag of a dataclass or an object of one, including those of nested dataclasses; two of a switch."""
    return [
        flag
        for path, is_switch in _paths_of(options)
        for flag in ((f"--{path}", _turned_off(path)) if is_switch else (f"--{path}",))
    ]


def _paths_of(options: Any, parent: str = "") -> Iterator[tuple[str, bool]]:
    """Path of every field, with hyphens, and whether it is True or False."""
    if not is_dataclass(options):
        for one in _kinds(options):
            yield from _paths_of(one, parent)
        return
    hints = get_type_hints(options if isinstance(options, type) else type(options))
    for field in fields(options):
        if _POSITIONAL in getattr(field.type, "__metadata__", ()):
            continue
        value = hints[field.name] if isinstance(options, type) else getattr(options, field.name)
        # ``config`` of commands that take a recipe has no name on the command line
        path = parent if field.name == "config" and not parent else f"{parent}.{field.name}".strip(".")
        if is_dataclass(value):
            yield from _paths_of(value, path)
        else:
            yield path.replace("_", "-"), hints[field.name] is bool


def _turned_off(path: str) -> str:
    """The flag by which tyro turns a switch off."""
    parent, dot, name = path.rpartition(".")
    return f"--{parent}{dot}no-{name}"


def _spelled_for_tyro(arguments: Sequence[str], options: Any) -> list[str]:
    """``--a.b False`` and ``--a.b=False``, which people write as for any other field, as ``--a.no-b``."""
    switches = {f"--{path}": path for path, is_switch in _paths_of(options) if is_switch}
    spelled: list[str] = []
    rest = list(arguments)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        path = switches.get(flag.replace("_", "-"))
        if path is None or (has_value and value.lower() not in _TRUTH):
            spelled.append(f"{flag}{has_value}{value}")
            continue
        if not has_value and rest and rest[0].lower() in _TRUTH:
            value = rest.pop(0)
        spelled.append(f"--{path}" if _TRUTH.get(value.lower(), True) else _turned_off(path))
    return spelled
