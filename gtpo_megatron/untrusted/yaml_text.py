"""Strict reader of YAML with plain values: objects, lists, text, numbers, booleans.

It refuses repeated keys, anchors, tags of other types, and depth and digits as in JSON. Numbers follow YAML 1.2:
``1e-6`` is a number, which YAML 1.1 reads as text.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from gtpo_megatron.errors import DataError, GTPOError
from gtpo_megatron.untrusted.json_text import MAX_DEPTH, MAX_DIGITS
from gtpo_megatron.untrusted.text import printable, read_text, shown

MAX_YAML_BYTES = 1 << 20
"""Size limit of a file; PyYAML reads 100 kB per second."""

_MAX_BITS = 1000
"""Limit of an integer, about ``MAX_DIGITS`` decimal digits, also for hexadecimal ones."""


def parse_yaml(text: str, place: str, *, error: type[GTPOError] = DataError) -> object:
    """Parses a text.

    Args:
        text: one YAML document.
        place: place for messages, usually the file's path.
        error: class of errors raised.

    Raises:
        GTPOError: ``error``: it is not YAML, or YAML that is refused.
    """
    if len(text) > MAX_YAML_BYTES:
        raise error(f"{place}: is larger than {MAX_YAML_BYTES} bytes, the most that is read of such a file")
    try:
        value: object = yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as problem:
        line = f" at line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise error(f"{place}: not valid YAML: {printable(problem.problem or problem.context)}{line}") from problem
    except yaml.reader.ReaderError as problem:
        raise error(f"{place}: not valid YAML: character {problem.character:#06x} is not allowed") from problem
    except (yaml.YAMLError, ValueError, OverflowError, KeyError, AttributeError) as problem:
        # PyYAML's constructors raise errors of int(), float() and date()
        raise error(f"{place}: not valid YAML: {printable(problem)}") from problem
    except RecursionError as problem:
        raise error(f"{place}: not valid YAML: nested more than {MAX_DEPTH} deep") from problem
    return value


def read_yaml(path: Path, *, error: type[GTPOError] = DataError) -> object:
    """Parses a file.

    Raises:
        GTPOError: ``error``: no such file, or one that cannot be read, or as in :func:`parse_yaml`.
    """
    return parse_yaml(read_text(path, limit=MAX_YAML_BYTES, error=error), printable(path), error=error)


def written_yaml(value: object) -> str:
    """YAML of plain values, which is read as the same values."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, width=120)


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader, restricted to plain values."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses anchors and deep nesting before objects are constructed."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(None, None, "anchors are not read; write the value out", event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuses keys that are not text, and repeated keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _refused(key, f"the key {shown(key.value)} is no text; put it into quotes")
            if key.value in seen:
                raise _refused(key, f"the key {shown(key.value)} is there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Refuses integers of too many digits."""
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MAX_BITS:
            raise _refused(node, f"an integer of more than {MAX_DIGITS} digits")
        return value

    def construct_plain_only(self, node: Any) -> Any:
        """Refuses dates, sets, bytes and other tags."""
        raise _refused(node, f"a value of the type {shown(node.tag.rpartition(':')[2])}; put text into quotes")


def _refused(node: Any, what: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that the reader would parse as a number."""


_FLOAT = "tag:yaml.org,2002:float"
_INT = "tag:yaml.org,2002:int"
_EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_PlainLoader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_PlainDumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_PlainLoader.add_constructor(_INT, _PlainLoader.construct_yaml_int)
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _PlainLoader.construct_plain_only)
_PlainLoader.add_constructor(None, _PlainLoader.construct_plain_only)
