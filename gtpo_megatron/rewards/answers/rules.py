r"""The spellings of an answer that become one before it is read: a table of rules, each with its reason.

``½`` and ``\frac12``, ``\(5\)`` and ``$5$``, ``4.5e33`` and ``4.5 \times 10^{33}``, ``\varnothing`` and ``\emptyset``.
The same rules apply to the reference and to the given answer, so both may be written either way.
"""

import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from latex2sympy2_extended.symbols import GREEK_LETTER_MAP

from gtpo_megatron.rewards.answers.fonts import BRACED, FONT, FONTED, INDEX, index, of_font
from gtpo_megatron.rewards.answers.groups import without_groups

_IN_BRACKETS = r"\(((?:[^()]|\([^()]*\))*)\)"
_TOKEN = r"(?:\d|[A-Za-z]|\\[A-Za-z]+)"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_END = r"(?![A-Za-z])"
"""After a command's name."""

_CHARACTERS = {
    **{letter: f"\\{name} " for letter, name in GREEK_LETTER_MAP.items() if len(letter) == 1},
    **dict.fromkeys("−–—‐‑﹣", "-"),  # noqa: RUF001 - the signs that people write
    **dict.fromkeys("\u2009\u202f\u2006\u200a", r"\,"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2005\u2007\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u2063", ""),
    **dict.fromkeys("’′ʹ", "'"),  # noqa: RUF001
    **{"″": "''", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "•": r"\cdot ", "÷": "/"},  # noqa: RUF001
    **dict.fromkeys("∕⁄", "/"),  # noqa: RUF001
    **dict.fromkeys("°º", r"^\circ "),
    **{"√": r"\sqrt ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "∞": r"\infty "},
    **{"≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm "},
    **{"≃": r"\simeq ", "≅": r"\cong ", "≐": r"\doteq ", "∼": r"\sim ", "∀": r"\forall "},  # noqa: RUF001
    **{"∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ", "∈": r"\in "},  # noqa: RUF001
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},  # noqa: RUF001
    **{"⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "△": r"\triangle ", "∧": " and ", "∨": " or "},  # noqa: RUF001
    **{"€": "", "£": "", "¥": "", "₹": "", "…": "...", "∑": r"\sum ", "∫": r"\int ", "∏": r"\prod ", "≡": r"\equiv "},
}
_TABLE = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₐₑₓₙ", "0123456789+-aexn", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")


@dataclass(frozen=True, slots=True)
class Rule:
    """One spelling that becomes another.

    Attributes:
        reason: origin of the first spelling.
        pattern: expression that finds it.
        replacement: text or function, as in :func:`re.sub`.
    """

    reason: str
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


def _rule(reason: str, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Rule:
    return Rule(reason, re.compile(pattern), replacement)


def _scaled(found: re.Match[str]) -> str:
    r"""``5 million`` as the product that it is, also where ``\text{ million euros}`` goes on."""
    rest = r"\text{" if found["open"] and not found["close"] else ""
    return f"\\times 10^{{{_SCALES[found['scale']]}}} {rest}"


def _repeating(found: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as the fraction that it is."""
    period = found["bar"] or found["digit"] or found["round"] or "".join(filter(None, found.group("d1", "d2", "d3")))
    before = found["before"]
    value = Fraction(int(found["whole"] + before + period) - int(found["whole"] + before), 10 ** len(before))
    value /= 10 ** len(period) - 1
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _joined(found: re.Match[str]) -> str:
    return re.sub(r"\D", "", found[0])


def _of_array(found: re.Match[str]) -> str:
    kind = {"|": "vmatrix", "(": "pmatrix", "[": "bmatrix"}.get(found["mark"] or "(", "pmatrix")
    return f"\\begin{{{kind}}}{found['rows']}\\end{{{kind}}}"


_MONEY = (
    rf"(?:^|(?<=[=,;]))\s*(?P<inside>{FONT}\{{\s*)?(?:Rs|INR|USD|EUR|GBP|US|HK|NT)\.?(?:\s|~|\\[ ,;])*"
    r"(?(inside)(?P<close>\}\s*)?)(?=[\d.])"
)
_OF_UNITS = r"(?:\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|-?\d))?\s*(?:\\cdot|\\times|/)?\s*)+"
_UNIT_FRACTION = rf"(?<=[\w}})\]%])\s*\\[dtc]?frac\s*\{{\s*(?:1|{_OF_UNITS})\s*\}}\s*\{{\s*{_OF_UNITS}\s*\}}"
_OF_MICRO = "(?:m|s|g|A|F|C|T|J|N|W|H|V|L|l|mol|Pa|Hz)"
_ROUGHLY = r"\s*,?\s*(?:or|which is|that is)?\s*(?:approximately|approx\.?|about|roughly)"
_ABOUT = rf"\s*(?:\\approx|{FONT}\{{{_ROUGHLY}\s*\}})\s*"
_THIN = r"(?:\\[,;:!]|\{\\,\}|~|\\ |')\s*"

RULES = (
    _rule("marks of math mode", r"(?<!\\)\\[()\[\]]|(?<!\\)\$+", " "),
    _rule("money", r"\\\$|\\(?:pounds|euro|textdollar)" + _END, ""),
    _rule("sizes of brackets", r"\\m?(?:left|right)" + _END + r"\.?|\\[bB]igg?[lrm]?" + _END, ""),
    _rule("old fonts", r"\{\s*\\(rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}]*)\}", r"\\math\1{\2}"),
    _rule("sizes of formulas", r"\\(?:(?:display|text|script)style|(?:no)?limits|rm|bf|it)" + _END, " "),
    _rule("a comma that is not followed by a space", r"(?:\\!)*(?:\{\s*,\s*\}\s*|,\s*\\!)(?:\s|\\[!,])*", ","),
    _rule("line breaks and blanks at the end", r"\\+\s*$", ""),
    _rule("thin spaces between thousands", rf"(?<![\d.,])\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)", _joined),
    _rule("spaces between thousands", r"^\s*-?\d{1,3}(?: \d{3})+\s*$", lambda found: found[0].replace(" ", "")),
    _rule(
        "spaces",
        r"(?<!\\)\\[,;:!> ]|~|\\q?quad" + _END + r"|\\(?:thin|en)space" + _END + r"|\\hspace\*?\{[^{}]*\}",
        " ",
    ),
    _rule("colours and frames", r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    _rule("colours and frames", rf"\\(?:underline|fbox|boxed|ensuremath)\s*(?={BRACED})", ""),
    _rule("unit vectors", r"\\(?:hat|widehat|vec)\s*\{?\s*\\?([ijk])(?:math)?(?![A-Za-z])\s*\}?", r"\1"),
    _rule("the sign of a unit", rf"(?<=[\d\s,;~}}])\\mu\s?\\(mathrm|text)\{{(?=\s*{_OF_MICRO}\s*\}})", r"\\\1{\\mu "),
    _rule("approximately in words", rf"(?<=[\w}})])\s*{FONT}\{{{_ROUGHLY}\s*\}}", r" \\approx "),
    _rule("an approximation in brackets", rf"(?<=[\w}})\s])\({_ABOUT}([^()]*)\)\s*$", r" \\approx \1"),
    _rule(
        "money before a number", _MONEY, lambda found: found["inside"] if found["inside"] and not found["close"] else ""
    ),
    _rule("indices", INDEX, index),
    _rule("fonts", FONTED, of_font),
    _rule("decimal logarithms", r"\\lg(?![A-Za-z])(?!\s*_)", r"\\log_{10} "),
    _rule("a unit as a fraction", _UNIT_FRACTION, r"\\text{ unit}"),
    _rule(
        "millions and the like",
        rf"(?<=[\d}}])\s*(?P<open>\\text\{{\s*)?(?P<scale>{'|'.join(_SCALES)})s?(?![A-Za-z])(?P<close>(?(open)\s*\}}))?",
        _scaled,
    ),
    _rule("sizes of fractions", r"\\[dtc]frac" + _END, r"\\frac"),
    _rule("fractions of old TeX", r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    _rule("binomials of old TeX", r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    _rule("sizes of binomials", r"\\[dt]binom" + _END, r"\\binom"),
    _rule("a numerator without braces", rf"\\(frac|binom)\s*({_TOKEN})", r"\\\1{\2}"),
    _rule("a denominator without braces", rf"(\\(?:frac|binom)\s*{BRACED})\s*({_TOKEN})", r"\1{\2}"),
    _rule("spaces in a fraction", rf"\\frac\s*({BRACED})\s*({BRACED})", r"\\frac\1\2"),
    _rule("a root as programs write it", r"(?<![A-Za-z\\])sqrt(?=\s*[\d(])", r"\\sqrt "),
    _rule("a root of brackets", rf"\\sqrt\s*(\[\d+\])?\s*{_IN_BRACKETS}", r"\\sqrt\1{\2}"),
    _rule("a root without braces", r"\\sqrt\s*(\[\d+\])?\s*(\d+|[A-Za-z]|\\[A-Za-z]+)", r"\\sqrt\1{\2}"),
    _rule("names of bars", r"\\(?:[lr]?[vV]ert|mid)" + _END + r"|(?<!\\)\\\|", "|"),
    _rule("names of braces", r"\\lbrace" + _END, r"\\{"),
    _rule("names of braces", r"\\rbrace" + _END, r"\\}"),
    _rule("names of brackets", r"\\l(?:brack|paren)" + _END, lambda found: "[" if "k" in found[0] else "("),
    _rule("names of brackets", r"\\r(?:brack|paren)" + _END, lambda found: "]" if "k" in found[0] else ")"),
    _rule("at most", r"\\leqslant" + _END + r"|\\leqq" + _END + r"|\\le" + _END + "|<=", r"\\leq "),
    _rule("at least", r"\\geqslant" + _END + r"|\\geqq" + _END + r"|\\ge" + _END + "|>=", r"\\geq "),
    _rule("unequal", r"\\ne" + _END + r"|!=|\\not\s*=", r"\\neq "),
    _rule("less", r"\\lt" + _END, "<"),
    _rule("more", r"\\gt" + _END, ">"),
    _rule("equal", r"==", "="),
    _rule("about", r"\\(?:approx(?:eq)?|simeq|doteq|thickapprox)" + _END, r"\\approx "),
    _rule(
        "about a number",
        rf"\\(?:sim|cong){_END}(?=\s*[-+]?[\d.,]+(?:\\text{BRACED}|[\s%]|\\%|\^\\circ)*$)",
        r"\\approx ",
    ),
    _rule("infinity", r"\\infin" + _END + r"|(?<![A-Za-z\\])(?:infinity|infty|inf|oo)" + _END, r"\\infty "),
    _rule("the empty set", r"\\varnothing" + _END + r"|\\\{\s*\\\}", r"\\emptyset "),
    _rule("the reals in words", r"^\s*(?:\\text\{)?\s*all reals?(?: numbers?)?\s*\}?\s*$", r"\\mathbb{R}"),
    _rule("and, or", r"\\(?:land|wedge)" + _END + r"|(?<!\\)\\&", " and "),
    _rule("and, or", r"\\(?:lor|vee)" + _END, " or "),
    _rule("dots", r"\\[lc]?dots" + _END, "..."),
    _rule(
        "repeating decimals",
        r"(?<![\w.])(?P<whole>\d+)\.(?P<before>\d*)(?:\\(?:overline|bar|overbar)\s*(?:\{(?P<bar>\d+)\}|(?P<digit>\d))"
        r"|\\dot\s*\{?(?P<d1>\d)\}?(?:(?P<d2>\d*)\\dot\s*\{?(?P<d3>\d)\}?)?|\((?P<round>\d+)\))",
        _repeating,
    ),
    _rule("a power as programs write it", r"\*\*", "^"),
    _rule("a product as programs write it", r"\*|\\ast" + _END, r"\\cdot "),
    _rule("a quotient", r"\\div" + _END, "/"),
    _rule("times ten to the", r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    _rule("degrees", r"\^\s*\{\s*\\circ\s*\}|\\degree" + _END, r"^\\circ "),
    _rule("degrees in words", r"(?<=[\d})])\s*(?:\\text\{\s*degrees?\s*\}|degrees?\s*$)", r"^\\circ "),
    _rule("an exponent without braces", r"\^\s*([-+]?\d+)", r"^{\1}"),
    _rule("an exponent in brackets", rf"\^\s*{_IN_BRACKETS}", r"^{\1}"),
    _rule("an index without braces", r"_\s*(\d\d+)", r"_{\1}"),
    _rule("an index in braces", r"_\s*\{\s*(\w)\s*\}", r"_\1"),
    _rule(
        "e-notation",
        r"(?<![\w.\\])((?:\d+\.?\d*|\.\d+))[eE]([-+]?)0*(\d+)(?!\.?\d)",
        lambda found: f"{found[1]}\\times 10^{{{found[2].strip('+')}{found[3]}}}",
    ),
    _rule("a point that ends a number", r"(\d)\.(?![\d.])", r"\1"),
    _rule("a point that begins one", r"(?<![\d.])\.(?=\d)", "0."),
    _rule("percent", r"\\?%|(?<=\d)\s*(?:\\text\{\s*)?(?:percent(?:age)?|pct)\b\s*\}?", r"\\%"),
    _rule(
        "arrays in brackets",
        r"(?P<mark>[|(\[])?\s*\\begin\{(?:array|smallmatrix|matrix)\}(?:\s*\{[clr|]*\})?(?P<rows>.*?)"
        r"\\end\{(?:array|smallmatrix|matrix)\}\s*(?(mark)[|)\]])",
        _of_array,
    ),
    _rule(
        "remainders",
        r"\\(?:pmod|bmod|mod)\s*\{?\s*(\w+)\s*\}?|\(\s*(?:\\text\{\s*)?mod\s*\}?\s*(\w+)\s*\)",
        lambda found: f"\\pmod{{{found[1] or found[2]}}}",
    ),
    _rule("braces that group nothing", r"(?s).+", lambda found: without_groups(found[0])),
    _rule("nothing", r"\{\s*\}", ""),
)
"""Applied in this order."""


@functools.lru_cache(maxsize=4096)
def normalised(text: str) -> str:
    """The answer in the one spelling that is read."""
    text = _VULGAR.sub(lambda found: _fraction_of(found[0]), text)
    text = _RAISED.sub(lambda found: f"^{{{''.join(map(_SUPERSCRIPTS.__getitem__, found[0]))}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{''.join(map(_SUBSCRIPTS.__getitem__, found[0]))}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_TABLE))
    for rule in RULES:
        text = rule.pattern.sub(rule.replacement, text)
    return _without_pictures(re.sub(r"\s+", " ", text).strip(" .,;:`_"))


def _without_pictures(text: str) -> str:
    """The answer without the pictures that chat models put behind it; a picture alone stays."""
    end = len(text)
    while end and (unicodedata.category(text[end - 1]) in ("So", "Mn") or text[end - 1] == " "):
        end -= 1
    return text[:end] or text


def _fraction_of(character: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"
