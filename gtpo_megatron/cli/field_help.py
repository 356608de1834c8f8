"""Help on a recipe's fields, a line each: all of them, those of one section, or everything about one."""

import difflib
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from textwrap import wrap
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gtpo_megatron.errors import ConfigError

_ENTRY = re.compile(r"    (\w+): (.*)")
_MOST_FLAG, _MOST_DEFAULT = 44, 16
"""Widest columns; a longer flag or default moves the rest of its line."""
_PROSE_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldHelp:
    """What is said of one field.

    Attributes:
        path: as in a configuration file, such as ``algorithm.off_policy.mode``.
        kind: of its values, such as ``INT`` or ``{a,b}``; empty for True and False.
        default: its value in the recipe.
        text: from its class's docstring.
    """

    path: str
    kind: str
    default: str
    text: str

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{self.path.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A dataclass among the options and the fields in it, without those of its own sections.

    Attributes:
        path: such as ``algorithm.off_policy``; empty for the options themselves.
        text: what it is about.
        fields: in the order of the class.
    """

    path: str
    text: str
    fields: tuple[FieldHelp, ...]


def sections_of(options: Any) -> list[Section]:
    """All sections of an object of options, outer ones first.

    Args:
        options: a dataclass; its field ``config`` has no name on the command line.
    """
    return list(_sections(options, path="", text=""))


def attribute_texts(kind: type) -> dict[str, str]:
    """Name -> text of the ``Attributes:`` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        lines = inspect.cleandoc(one.__dict__.get("__doc__") or "").splitlines()
        if "Attributes:" not in lines:
            continue
        name = ""
        for line in lines[lines.index("Attributes:") + 1 :]:
            if entry := _ENTRY.fullmatch(line):
                name, found[entry[1]] = entry[1], entry[2]
            elif line.startswith("     ") and name:
                found[name] += f" {line.strip()}"
            elif line:
                break
    return {name: text.replace("``", "`") for name, text in found.items()}


def help_text(options: Any, *, program: str, about: str, topic: str = "", width: int = 0) -> str:
    """What ``--help`` prints after a recipe.

    Args:
        options: with the recipe's values.
        program: with the recipe, as a person types it.
        about: lines at the top of the whole help.
        topic: a section or a field; empty: everything.
        width: lines are cut there; 0: never.

    Raises:
        ConfigError: there is no such section or field.
    """
    sections = sections_of(options)
    if topic:
        return _on_topic(sections, topic.removeprefix("--").replace("-", "_"), width)
    names = ", ".join(section.path for section in sections if section.path and "." not in section.path)
    head = (
        f"usage: {program} [--field VALUE ...]\n\n{about}\n\n"
        "--help SECTION lists the fields of one section, --help FIELD says everything about one (rollout.group-size).\n"
        f"Sections: {names}.\nTrue or False: --a.b or --a.no-b."
    )
    return "\n\n".join([head, *_listed([section for section in sections if section.fields], width)])


def _on_topic(sections: Sequence[Section], topic: str, width: int) -> str:
    inside = [section for section in sections if section.path == topic or section.path.startswith(f"{topic}.")]
    if inside:
        shown = [section for section in inside if section.fields] or inside
        return "\n\n".join(_listed(shown, width))
    every = [field for section in sections for field in section.fields]
    named = [field for field in every if topic in (field.path, field.path.rpartition(".")[2])]
    if not named:
        known = [section.path for section in sections if section.path] + [field.path for field in every]
        close = difflib.get_close_matches(topic, known, n=1) or [path for path in known if topic in path][:1]
        outer = ", ".join(section.path for section in sections if section.path and "." not in section.path)
        meant = f"did you mean {close[0]}?" if close else f"the sections are {outer}"
        raise ConfigError(f"--help {topic}: no such section or field; {meant}")
    return "\n\n".join(_whole(field) for field in named)


def _whole(field: FieldHelp) -> str:
    values = field.kind or f"turned on by {field.flag}, off by {_negated(field.flag)}"
    lines = [f"{field.flag} {field.kind}".rstrip(), f"    values   {values}", f"    default  {field.default}"]
    return "\n".join([*lines, *wrap(field.text, _PROSE_WIDTH, initial_indent="    ", subsequent_indent="    ")])


def _negated(flag: str) -> str:
    outer, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{outer}{dot}no-{name}"


def _listed(sections: Sequence[Section], width: int) -> list[str]:
    every = [field for section in sections for field in section.fields]
    flag = min(max((len(field.flag) for field in every), default=0), _MOST_FLAG)
    default = min(max((len(field.default) for field in every), default=0), _MOST_DEFAULT)
    found = []
    for section in sections:
        lines = [f"{section.path.replace('_', '-') or 'options'}: {section.text}".rstrip(": ")]
        lines += [f"  {one.flag:<{flag}}  {_short(one.default):<{default}}  {one.text}" for one in section.fields]
        found.append("\n".join(_cut(line.rstrip(), width) for line in lines))
    return found


def _short(default: str) -> str:
    """A default of at most a column's width; of a path its end is told apart more easily."""
    return default if len(default) <= _MOST_DEFAULT else f"...{default[3 - _MOST_DEFAULT :]}"


def _cut(line: str, width: int) -> str:
    return line if not width or len(line) <= width else f"{line[: width - 3]}..."


def _sections(value: Any, *, path: str, text: str) -> Iterator[Section]:
    hints, texts = get_type_hints(type(value), include_extras=False), attribute_texts(type(value))
    own: list[FieldHelp] = []
    of_recipe: tuple[FieldHelp, ...] = ()
    inner: list[Section] = []
    for field in fields(value):
        found = getattr(value, field.name)
        where = path if field.name == "config" and not path else f"{path}.{field.name}".strip(".")
        if not is_dataclass(found):
            shown = json.dumps(found) if isinstance(found, dict) else str(found)
            shown = " ".join(map(str, found)) if isinstance(found, tuple) else shown
            one_line = " ".join(shown.split()) or "''"
            kind = _kind(hints[field.name])
            own.append(FieldHelp(path=where, kind=kind, default=one_line, text=texts.get(field.name, "")))
            continue
        more = list(_sections(found, path=where, text=texts.get(field.name) or _first_line(type(found))))
        if where == path:  # the recipe's own fields stand beside the command's
            of_recipe, more = more[0].fields, more[1:]
        inner += more
    yield Section(path=path, text=text, fields=(*own, *of_recipe))
    yield from inner


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0].replace("``", "`")


def _kind(hint: Any) -> str:
    """Values of a type as a command line takes them; empty for bool."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is bool:
        return ""
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (Union, types.UnionType):
        return "|".join("None" if one is type(None) else _kind(one) for one in inner)
    if origin is tuple:
        return f"{_kind(inner[0])} ..." if inner[-1] is Ellipsis else " ".join(map(_kind, inner))
    if origin is Mapping:
        return "JSON"
    return {int: "INT", float: "FLOAT", str: "STR"}.get(hint, getattr(hint, "__name__", str(hint)).upper())
