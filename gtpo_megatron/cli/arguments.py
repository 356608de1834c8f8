"""Parses command-line options; an error is one line that suggests similar options."""

import ast
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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

from gtpo_megatron.cli.field_help import attribute_texts
from gtpo_megatron.cli.reader import reader_may_leave
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

Options = TypeVar("Options")

EXIT_USAGE = 2

_TRUTH = {"true": True, "false": False}

_MARKUP = re.compile(r"\[/?bold\]")

SHOWN_CHARACTERS = 200
"""Of a quoted argument in a message."""

_BARE_LIST = re.compile(r"\[\s*[\w.-]+(\s*,\s*[\w.-]+)+\s*\]")
"""A list without quotes, as in Hydra. Of one word alone it may be meant: ``[END]``."""
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
_JSON_WORDS = re.compile(r"\b(true|false|null)\b")

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
    _refuse_lists_in_one_word(arguments, options)
    with reader_may_leave(), on_parse_error(refuse), _WITH_MAPPINGS:
        found: Options = tyro.cli(
            kind,
            prog=program,
            args=_spelled_for_tyro(arguments, options),
            description=description,
            config=(tyro.conf.AvoidSubcommands,) if is_one else (),
            default=tyro.MISSING_NONPROP if default is None else default,
        )
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


def _mapping_of(words: list[str]) -> dict[str, object]:
    found = parse_json(words[0], "it", error=ConfigError)
    if not isinstance(found, dict):
        raise ConfigError(f"it is {shown(found)}; expected an object")
    return found


_MAPPING = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_mapping_of,
    is_instance=lambda value: isinstance(value, Mapping),
    str_from_instance=lambda value: [json.dumps(value)],
)

_WITH_MAPPINGS = tyro.constructors.ConstructorRegistry()


@_WITH_MAPPINGS.struct_rule
def _with_mappings(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """Dataclasses with a mapping among their fields: tyro would take every key of its default for an option."""
    hints = get_type_hints(info.type) if is_dataclass(info.type) else {}
    if not any(get_origin(hint) is Mapping for hint in hints.values()):
        return None
    texts = attribute_texts(info.type)

    def default_of(field: Any) -> Any:
        if is_dataclass(info.default):
            return getattr(info.default, field.name)
        if field.default_factory is not MISSING:
            return field.default_factory()
        return tyro.MISSING if field.default is MISSING else field.default

    kinds: dict[str, Any] = {
        name: Annotated[hint, _MAPPING] if get_origin(hint) is Mapping else hint for name, hint in hints.items()
    }
    return tyro.constructors.StructConstructorSpec(
        instantiate=info.type,
        fields=tuple(
            tyro.constructors.StructFieldSpec(
                name=field.name,
                type=kinds[field.name],
                default=default_of(field),
                helptext=texts.get(field.name),
            )
            for field in fields(info.type)
        ),
    )


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


def _refuse_lists_in_one_word(arguments: Sequence[str], options: Any) -> None:
    """Raises ConfigError if the value of a list is itself spelled like a list, as other programs want theirs."""
    lists = {f"--{path}" for path, hint in _paths_of(options) if get_origin(hint) is tuple}
    given: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        if argument.startswith("--"):
            flag, has_value, value = argument.partition("=")
            given.append((flag.replace("_", "-"), [value] if has_value else []))
        else:
            given[-1][1].append(argument)
    for flag, words in given:
        for text in (*words, " ".join(words)) if flag in lists else ():
            if (found := _words_of_list(text)) is not None:
                raise ConfigError(
                    f"{flag} {_cut(text)}: looks like a list in one text; give its values one after another: "
                    f"{' '.join([flag, *map(_quoted, found)])}; a text that is meant so is set in a recipe or a "
                    f"config.yaml"
                )


def _words_of_list(text: str) -> list[str] | None:
    """The values in a text that is a list, a tuple, a set or a mapping of JSON or Python; None for any other text."""
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    if _BARE_LIST.fullmatch(text):
        return [word.strip() for word in text[1:-1].split(",")]
    try:
        found = ast.literal_eval(_JSON_WORDS.sub(lambda word: _PYTHON_WORDS[word[0]], text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return [str(one) for one in found] if isinstance(found, list | tuple | set | dict) else None


def _quoted(word: str) -> str:
    return _cut(word) if re.fullmatch(r"[\w./:@%+=-]+", word) else f"'{_cut(word)}'"


def flags_of(options: Any) -> list[str]:
    """Every flag of a dataclass or an object of one, including those of nested dataclasses; two of a switch."""
    return [
        flag
        for path, hint in _paths_of(options)
        for flag in ((f"--{path}", _turned_off(path)) if hint is bool else (f"--{path}",))
    ]


def _paths_of(options: Any, parent: str = "") -> Iterator[tuple[str, Any]]:
    """Path of every field, with hyphens, and its type."""
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
            yield path.replace("_", "-"), hints[field.name]


def _turned_off(path: str) -> str:
    """The flag by which tyro turns a switch off."""
    parent, dot, name = path.rpartition(".")
    return f"--{parent}{dot}no-{name}"


def _spelled_for_tyro(arguments: Sequence[str], options: Any) -> list[str]:
    """``--a.b False`` and ``--a.b=False``, which people write as for any other field, as ``--a.no-b``."""
    switches = {f"--{path}": path for path, hint in _paths_of(options) if hint is bool}
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
