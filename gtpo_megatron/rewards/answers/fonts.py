r"""What a letter, a word, a unit or a formula in a font is: ``\mathrm{e}``, ``\text{ and }``, ``\mathrm{m/s^{2}}``.

Words and units become ``\text{...}`` without braces in it; mathematics becomes itself.
"""

import re

BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
"""A brace with up to two levels of braces in it."""
FONT = r"\\(?:math(?:rm|bf|it|sf|tt|normal)|text(?:bf|rm|it|sf|tt|normal)?|operatorname\*?|mbox|hbox|boldsymbol|bm)\s*"
FONTED = rf"(?P<font>{FONT})(?P<braced>{BRACED})"
INDEX = rf"_\s*(?:{FONT}{BRACED}|{BRACED}|\\[A-Za-z]+)"

_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
        *("log", "ln", "lg", "exp", "max", "min", "gcd", "lcm", "det"),
    )
)
_NO_UNITS = frozenset("abknpqrvwxyz")
"""Letters that are symbols in any font."""
_UPRIGHT = re.compile(r"\\(?:mathrm|text|operatorname|mbox|hbox)")
"""Fonts of units."""
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad(?![A-Za-z])")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[A-Za-z]{2,}[ -]+[A-Za-z]{2,}")
_SIGNS = re.compile(r"[\\{}^_=+*<>|]")
_SYMBOLS = re.compile(r"/|\d\s*[A-Za-z(]|[A-Za-z(]\s*\d")
"""Which are words in a font of words: ``N/A``, ``to 6``."""
_OF_TEXT = re.compile(r"\\(?:text|mbox|hbox)")
_JOINED = re.compile(r"[,;]?\s*\b(and|or)\b\s*[,;]?")
_JOINED_BEFORE = re.compile(r"[,;]?\s*(and|or)\s+(?P<rest>\S.*)", re.DOTALL)
_JOINED_BEHIND = re.compile(r"(?P<rest>.*\S)\s+(and|or)", re.DOTALL)

_PREFIX = r"(?:[kMGTmcdnpfhµ]|\\mu\s*|da)?"
_ATOM = (
    rf"(?:{_PREFIX}(?:m|g|s|A|K|mol|cd|Hz|N|Pa|J|W|C|V|F|T|H|L|l|eV|cal|bar|rad|sr|Wb|Bq|Gy|Sv|\\Omega|\\AA)"
    r"|min|hr?s?|sec|yr|d|ft|in|lbs?|mi|mph|rpm|atm|\^?\s*(?:\{\s*)?\\circ(?:\s*\})?\s*[CF]?|[A-Za-z]{4,})(?![A-Za-z])"
)
_RAISED = r"(?:\s*\^\s*(?:\{\s*[-+]?\d\s*\}|[-+]?\d))?"
_UNITS = rf"\(?{_ATOM}{_RAISED}\)?(?:\s*(?:/|\\cdot|\\times|·|\*|\s|per)?\s*\(?{_ATOM}{_RAISED}\)?)*"
_QUOTIENT = rf"\\[dtc]?frac\s*\{{\s*(?:1|{_UNITS})\s*\}}\s*\{{\s*{_UNITS}\s*\}}"
_UNIT = re.compile(rf"\s*(?:{_UNITS}|{_QUOTIENT})\s*")
_BEHIND = re.compile(r"[\w})\]!%]\s*$")
"""Where a unit may stand: behind a number or an expression."""
_COUNTED = re.compile(
    r"(?P<number>-?\d[\d,]*(?:\.\d+)?)"
    rf"(?P<unit>\s+(?:(?!(?:and|or|to|plus|minus|base|in base)\b)[A-Za-z][A-Za-z .-]*|{_UNITS}))"
)
"""A number and what is counted, in one font."""
_OPERATORS = re.compile(r"\\(?:o?i*int|sum|prod|lim|log|big(?:cup|cap)|max|min|sup|inf)\s*$")
"""Whose index is a bound or a base."""
_NAMES_IN_INDEX = re.compile(r"\\(?!infty|cdot|pm|to|text)([A-Za-z]+)")


def of_font(found: re.Match[str]) -> str:
    """A letter or a number in another font is itself; a function's name is the function; other words are text."""
    content = _SPACES.sub(" ", re.sub(FONTED, of_font, found["braced"][1:-1])).strip()
    inside = _of_content(content, found)
    if inside is not None:
        return inside
    if _is_unit(content, found):
        return f"\\text{{ {_flat(content)}}}"
    if counted := _COUNTED.fullmatch(content):
        return f"{counted['number']}\\text{{{_flat(counted['unit'])}}}"
    for pattern in (_JOINED_BEFORE, _JOINED_BEHIND):
        if joined := pattern.fullmatch(content):
            rest = of_font_again(joined["rest"])
            return f" {joined[1]} {rest}" if pattern is _JOINED_BEFORE else f"{rest} {joined[2]} "
    if _is_mathematics(content, found["font"]):
        return f"{{{content}}}"
    kept = " " if found["braced"][1:2].isspace() else ""
    return f"\\text{{{kept}{_flat(content)}}}"


def of_font_again(content: str) -> str:
    r"""The same for a part of a text: ``\text{and 19}`` holds the number 19."""
    return re.sub(FONTED, of_font, f"\\text{{{content}}}")


def _of_content(content: str, found: re.Match[str]) -> str | None:
    """One name, number, letter or conjunction; None for anything longer."""
    if content in _FUNCTIONS:
        return f"\\{content} "
    if content == "e":
        return "{e}"  # Euler's, also before digits
    without_commands = re.sub(r"\\[A-Za-z]+", "", content)
    if content == "i" or (not re.search("[A-Za-z]", without_commands) and not _is_unit(content, found)):
        return content if "\\" not in content else f"{{{content}}}"
    has_index = found.string[found.end() :].lstrip()[:1] == "_"
    if len(content) == 1 and (content in _NO_UNITS or has_index or not _UPRIGHT.match(found["font"])):
        return content
    joined = _JOINED.fullmatch(content)
    return f" {joined[1]} " if joined else None


def _is_unit(content: str, found: re.Match[str]) -> bool:
    r"""Whether it is a unit behind a number; ``\Omega`` and ``m/s`` are symbols elsewhere."""
    if not _UPRIGHT.match(found["font"]) or not _UNIT.fullmatch(content):
        return False
    return _BEHIND.search(_SPACES.sub(" ", found.string[max(0, found.start() - 30) : found.start()])) is not None


def _is_mathematics(content: str, font: str) -> bool:
    if _WORDS.search(content):
        return False
    return bool(_SIGNS.search(content) or (not _OF_TEXT.match(font) and _SYMBOLS.search(content)))


def _flat(content: str) -> str:
    """Without braces, which the readers of units and words do not expect in a text."""
    plain = re.sub(r"\\(?:[dtc]?frac|cdot|times)(?![A-Za-z])", " ", re.sub(r"\s*\^\s*", "", content).replace("}{", "/"))
    return re.sub("[{}]", "", plain)


def index(found: re.Match[str]) -> str:
    r"""One spelling of an index: ``_\text{max}``, ``_{\mathrm{max}}``, ``_\max`` and ``_{max}``; ``_\odot``."""
    content = re.sub(FONTED, lambda font: font["braced"][1:-1], found[0][1:].strip())
    content = _SPACES.sub(" ", content.strip()).strip()
    if content.startswith("{") and content.endswith("}"):
        content = content[1:-1].strip()
    if not _OPERATORS.search(found.string[max(0, found.start() - 20) : found.start()]):
        content = _NAMES_IN_INDEX.sub(r"\1", content)
    return f"_{content}" if re.fullmatch(r"\w", content) else f"_{{{content}}}"
