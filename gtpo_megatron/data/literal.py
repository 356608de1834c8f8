"""Lists and objects that a column has as text, of JSON or of Python, as tables of text do."""

import ast

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.json_text import parse_json

MAX_LITERAL = 1 << 20
"""Characters of a text that is read as a list or an object."""

_CLOSING = {"[": "]", "{": "}"}


def literal(value: object, opening: str) -> object:
    """The list or object in a text, of JSON or of Python; anything else as it is.

    Args:
        value: value of a column.
        opening: bracket that the text must begin with.
    """
    text = value.strip() if isinstance(value, str) else ""
    if not text.startswith(opening) or not text.endswith(_CLOSING[opening]) or len(text) > MAX_LITERAL:
        return value
    try:
        return parse_json(text, "")
    except DataError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
