"""Parses command-line options; an error is one line that suggests similar options."""

import ast
import difflib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import groupby
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from pydantic.dataclasses import is_pydantic_dataclass

from gtpo_megatron.cli.field_help import attribute_texts
from gtpo_megatron.cli.reader import reader_may_leave
from gtpo_megatron.config.configuration import make
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

Options = TypeVar("Options")

EXIT_USAGE = 2

_TRUTH = {"true": True, "false": False}

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"[\s│─-]*")

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

    An option of a list that is given several times has the values of all; any other has its last value.

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
    is_one = len(_kinds(kind)) == 1
    _refuse_lists_in_one_word(arguments, options)
    with reader_may_leave(), _OUR_CLASSES, redirect_stderr(io.StringIO()) as said:
        try:
            found, unknown = tyro.cli(
                kind,
                prog=program,
                args=_spelled_for_tyro(_joined(arguments, options), options),
                description=description,
                config=(tyro.conf.AvoidSubcommands,) if is_one else (),
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
            )
        except SystemExit as stop:
            if not stop.code:
                raise
            problem = _sentence(said.getvalue())
            if problem.startswith("Expected one of {") and arguments:  # tyro does not repeat a subcommand
                problem = f"{shown(arguments[0])}: {problem}"
            raise ConfigError(problem) from None
    if unknown:
        raise ConfigError(_unknown(unknown, flags_of(options)))
    try:
        return _built(found)  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(_with_flag(str(error), arguments)) from error


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

_OUR_CLASSES = tyro.constructors.ConstructorRegistry()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """A dataclass and its values, to be made of them once everything else on the line is known to be right."""

    kind: Any
    values: Mapping[str, Any]


def _built(found: Any) -> Any:
    if not isinstance(found, _Parts):
        return found
    return make(found.kind, {name: _built(one) for name, one in found.values.items()})


@_OUR_CLASSES.struct_rule
def _our_class(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """A dataclass, made after tyro is done; tyro would also take every key of a mapping for an option."""
    if not any(map(is_pydantic_dataclass, getattr(info.type, "__mro__", ()))):  # or derives from one
        return None
    plain, hints, texts = (
        get_type_hints(info.type),
        get_type_hints(info.type, include_extras=True),
        attribute_texts(info.type),
    )

    def default_of(field: Any) -> Any:
        if is_dataclass(info.default):
            return getattr(info.default, field.name)
        if field.default_factory is not MISSING:
            return field.default_factory()
        return tyro.MISSING if field.default is MISSING else field.default

    def type_of(name: str) -> Any:
        if get_origin(plain[name]) is Mapping:
            return Annotated[Mapping[str, object], _MAPPING]
        if _POSITIONAL in getattr(hints[name], "__metadata__", ()):
            return Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]
        return hints[name]

    return tyro.constructors.StructConstructorSpec(
        instantiate=lambda **values: _Parts(kind=info.type, values=values),
        fields=tuple(
            tyro.constructors.StructFieldSpec(
                name=field.name,
                type=type_of(field.name),
                default=default_of(field),
                helptext=texts.get(field.name),
            )
            for field in fields(info.type)
        ),
    )


def _sentence(box: str) -> str:
    """The first paragraph of what tyro has printed, under its title; help texts follow, after a rule."""
    if sys.stdout.isatty():  # else tyro uses no colours
        box = _COLOURS.sub("", box)
    lines = ["" if _RULE.fullmatch(line) else line.strip(" │") for line in box.splitlines()[1:]]
    paragraphs = (" ".join(lines) for is_said, lines in groupby(lines, bool) if is_said)
    return _cut(next(paragraphs, box), 2 * SHOWN_CHARACTERS)


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


def _with_flag(message: str, arguments: Sequence[str]) -> str:
    """An error of a class, which names the field without its path, after the flag that has given it."""
    field = message.partition("=")[0].strip().replace("_", "-")
    given = [token.partition("=")[0] for token in arguments if token.startswith("--")]
    where = [flag for flag in given if flag.replace("_", "-").rpartition(".")[2].lstrip("-") == field and "." in flag]
    return f"{where[0]}: {message}" if where else message


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
    lists = _list_flags(options)
    for group in _groups(arguments):
        flag, words = _flag_and_words(group)
        for text in (*words, " ".join(words)) if flag in lists else ():
            if (found := _words_of_list(text)) is not None:
                raise ConfigError(
                    f"{flag} {_cut(text)}: looks like a list in one text; give its values one after another: "
                    f"{' '.join([flag, *map(_quoted, found)])}; a text that is meant so is set in a recipe or a "
                    f"config.yaml"
                )


def _joined(arguments: Sequence[str], options: Any) -> list[str]:
    """``--env A=1 --env B=2``, as docker and sbatch have it, as ``--env A=1 B=2``: tyro would keep the last one only.

    Raises:
        ConfigError: such a value begins with dashes, and would be taken for an option.
    """
    lists = _list_flags(options)
    joined: list[list[str]] = []
    first: dict[str, list[str]] = {}
    for group in _groups(arguments):
        flag, words = _flag_and_words(group)
        if flag not in first:
            joined.append(group)
        elif dashed := next((word for word in words if word.startswith("--")), None):
            raise ConfigError(
                f"{flag}={_cut(dashed)}: begins with dashes, so it can only be the first value; several of these are "
                f"set in a recipe or a config.yaml"
            )
        else:
            first[flag] += words
        if flag in lists:
            first.setdefault(flag, group)
    return [argument for group in joined for argument in group]


def _list_flags(options: Any) -> set[str]:
    return {f"--{path}" for path, hint in _paths_of(options) if get_origin(hint) is tuple}


def _groups(arguments: Sequence[str]) -> list[list[str]]:
    """Every flag with the words up to the next one; the first group has no flag."""
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([])
        groups[-1].append(argument)
    return groups


def _flag_and_words(group: Sequence[str]) -> tuple[str, list[str]]:
    """The flag of a group, with hyphens, and its words, the one behind ``=`` included; no flag is an empty one."""
    if not group or not group[0].startswith("--"):
        return "", list(group)
    flag, has_value, value = group[0].partition("=")
    return flag.replace("_", "-"), [*([value] if has_value else []), *group[1:]]


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
        if path is None:
            spelled.append(f"{flag}{has_value}{value}")
            continue
        if has_value and value.lower() not in _TRUTH:
            raise ConfigError(f"{flag}={_cut(value)}: must be True or False")
        if not has_value and rest and rest[0].lower() in _TRUTH:
            value = rest.pop(0)
        spelled.append(f"--{path}" if _TRUTH.get(value.lower(), True) else _turned_off(path))
    return spelled
