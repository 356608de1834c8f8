r"""Takes units off the end of an answer: ``5 cm``, ``5\text{ cm}^2``, ``5 miles per hour``, ``9 apples``.

Units are not compared: ``5`` equals ``5 cm``. Words that make another number of one are no units: ``2 thirds``,
``5 squared``, ``10 degrees below zero``.
"""

import re

_LONG = (
    "[ckµmn]m|in|ft|yd|mi|[km]g|lbs?|oz|[mn]s|hrs?|mins?|secs?|[md][Ll]|gal|mph|kmh|kph|[kMG]?Hz|k[NJWV]|MW|[kM]?Pa|atm|mol|"
    r"[kMG]?eV|deg|pc|AU|k?cal|USD|sq\.?|cu\.?"
)
_SHORT = "[mgshlLKCFNJWVA]"
_WORD = r"(?!(?:and|or|if|mod|sin|cos|tan|log|exp|for|sqrt|pi|theta|base|below\s+zero)\b)[A-Za-z]{3,}"
_CHANGES = (
    r"(?:squared|cubed|factorial|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|hundredth|"
    r"thousandth|millionth|billionth)s?)(?![A-Za-z])"
)
"""Right behind a number these make another one of it."""
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_TEXT = r"\\text\{(?![^{}]*\b(?:base|below\s+zero)\b)(?![^{}]*(?<=[\s{])[-+]?\d)[^{}]*\}"
"""Without a number in it: ``5\text{ to 6}`` and ``5\text{ ft 6 in}`` are not 5."""
_NEXT = (
    rf"(?:(?:\s*(?:/|\\cdot|\\times)\s*|\s+(?:per\s+)?)(?:{_TEXT}|(?:{_LONG}|{_SHORT})(?![A-Za-z])|{_WORD}){_POWER}"
    rf"|\s+(?:of|a|the|per|in)(?![A-Za-z]))*"
)
_IN_TEXT = re.compile(
    rf"(?P<number>.*?(?:[\d}})\]!A-Za-z%]))\s*(?!\\text\{{\s*{_CHANGES}){_TEXT}{_POWER}{_NEXT}", re.DOTALL
)
"""After anything but an operator."""
_PLAIN = re.compile(
    rf"(?P<number>(?:\\[A-Za-z]+|[^A-Za-z\\]|\\%)*[\d}})%])"
    rf"(?:\s*(?:{_LONG})(?![A-Za-z])|\s+{_SHORT}(?![A-Za-z])|\s+(?!{_CHANGES}){_WORD}){_POWER}{_NEXT}",
    re.DOTALL,
)
"""After a number; a letter right behind it, as in ``3t``, is a symbol."""
_ONE_LETTER = re.compile(rf"(?P<number>-?\d+(?:\.\d+)?){_SHORT}")


def without_units(text: str) -> str:
    """The answer without a unit."""
    for pattern in (_IN_TEXT, _PLAIN):
        found = pattern.fullmatch(text)
        if found is not None and found["number"].count("{") == found["number"].count("}"):
            return found["number"].strip()
    return text


def without_letter(text: str) -> str:
    """The number of ``5m``, which is a length where the other answer is a plain number; else the text."""
    found = _ONE_LETTER.fullmatch(text)
    return text if found is None else found["number"]
