"""The score in what a judge wrote: its answer without its thinking, and one table of the forms that a score has.

A wrong score teaches, and a missing one does not: what could be something else than a score is none.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gtpo_megatron.errors import DataError

_MARK = r"""(?<!["'`\u201c\u00ab])"""
"""Not directly after a quotation mark: there a mark of thinking is spoken of, and not written."""

_OPENED = re.compile(
    rf"(?i){_MARK}(?:<(?:\w{{1,9}}:)?(?:think(?:ing)?|thought)>|\[THINK\]|\u25c1think\u25b7|"
    r"<\|channel\|>(?:analysis|commentary)|(?-i:\A\s{0,9}analysis(?=[A-Z])))"
)
_CLOSED = re.compile(
    rf"(?i){_MARK}(?:</(?:\w{{1,9}}:)?(?:think(?:ing)?|thought)>|\[/THINK\]|\u25c1/think\u25b7|"
    r"<\|channel\|>final(?:<\|message\|>)?|(?-i:assistantfinal))"
)
"""The last of each are the channels of gpt-oss without their special tokens."""


def without_thinking(text: str) -> str:
    """What follows the last end of thinking; empty where thinking was begun after it and never ended.

    A policy's lone closing mark hides nothing from its grader, see ``untrusted/thinking.py``. A judge is trusted not to
    hide: what stands before a closing mark was thought, also where the endpoint took the opening one away, and so was
    what it wrote before it began to think again.
    """
    ends = [found.end() for found in _CLOSED.finditer(text)]
    answer = text[ends[-1] :] if ends else text
    return "" if _OPENED.search(answer) else answer


_MARKUP = r"*_~`\"'\u201c\u201d\u00ab\u00bb$"
_OPEN = rf"(?:[\s{_MARKUP}\[({{]|\\[a-z]{{1,12}}\{{|\\[(\[]|<(?=[^<>\n]{{1,12}}>)){{0,16}}+"
_CLOSE = rf"[{_MARKUP})\]}}>\\]{{0,12}}+"
_NUMBER = r"(?<![\d.,])(?P<score>-?(?:\d++(?:\.\d++|,\d{1,2}(?!\d))?|\.\d++))(?![.,]?\d)"
_SCALE = (
    rf"(?:{_CLOSE}(?:\s{{0,4}}\(?(?:/|\bout\s+of\b(?:\s+an?)?(?:\s+(?:possible|maximum|total|of)\b){{0,3}})\s{{0,4}}"
    rf"{_OPEN}(?P<scale>\d++(?:\.\d++)?)|\s?\\?(?P<percent>%)))?+"
)
_FITS = (
    r"(?:is|seems|would\s+be)\s+(?:fair|appropriate|justified|warranted|given|assigned|awarded|reasonable|right|"
    r"deserved|adequate)\b"
)
_NO_SCORE = (
    r"[/:]\d",  # a date, a time, a result of a match
    r"\s?\\?%",
    r"(?!(?:pts?|points?)\b)[A-Za-z]",  # 7th, 7B
    r"\s{0,4}=",  # a scale that is explained
    r"\s?\?|[\d^]|\s?\+\s?\d|\s?vs\b|,\s?\d++[)\]]",  # a question, a sum, a list
    r"(?:,\s?\d++){0,4}[ \t]{0,4}(?:\([^()\n]{0,40}\)\s?)?,?\s?\(?"  # a range, or one of two
    rf"(?:->|[-\u2013\u2014~\u2192\u2026&]|\b(?:to|or|and|through)\b(?:\s(?:maybe|perhaps))?|\.\.\.?)\s{{0,4}}{_OPEN}\d",
    r"\s(?:of\s)?(?:jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec)(?:[a-z]{4,6})?\b",
    rf"[ \t]+(?!{_FITS})(?:max|would|could|might|may|if|unless|when|requires?|needs|means|indicates|seems|"
    r"corresponds|is)\b",
)
"""What follows a number that is a part of something else, or of a scale, or only thought of."""

_VALUE = rf"{_NUMBER}{_SCALE}(?!{_CLOSE}(?:{'|'.join(_NO_SCORE)}))"
_PROSE_END = (
    r"(?![ \t]+(?!(?:points?|pts|marks?|overall|for|because|since|as|due|and|but|on|in|with|given|here|to|rather|is|"
    r"seems|would|although|though|which|based|reflecting|from|total)\b)[^\W\d])"
)
"""What follows is no thing that is counted: 7 out of 10 criteria."""

_WORD = r"(?<![A-Za-z0-9-])(?:score|rating|grade)(?![A-Za-z0-9])"
_CONTEXT = (
    rf"[ \t{_MARKUP}]{{0,6}}+(?:(?:\([^()\n]{{0,40}}\)|\[[^\[\]\n]{{0,40}}\]|(?:out of|from|on a scale|between|for)\b"
    rf"[^:=\n]{{0,40}}?|(?:assigned|given|awarded)\b)[ \t{_MARKUP}]{{0,6}}+)?"
)
_COLON = r"(?:[:=\uff1a|]|->|=>|\u2192|(?<=[ \t])[-\u2013\u2014](?=[ \t]))"
_KIND = (
    r"(?:\b(?:an?|the|my|our|its|this|that|final|overall|total|resulting|fair|appropriate|numeric(?:al)?|quality|"
    r"correctness)\s+)"
)
_SO = r"(?:\s+(?:therefore|thus|hence|then|just|only|exactly|simply|an?)\b){0,2}:?"
_CLAUSE = r"[^.,;:!?=\n\d]"
_LINE = rf"^[\s{_MARKUP}#>-]{{0,12}}+"
_WHOLE = rf"(?={_CLOSE}[.!]?[ \t]*$)"


@dataclass(frozen=True, slots=True)
class ScoreForm:
    r"""A form in which judges write a score.

    Attributes:
        examples: texts with the score 7.
        pattern: expression with the group ``score``, and ``scale`` or ``percent`` where the text says out of how many.
        needs_scale: whether it is no score unless it is out of the full score, or in ``[[ ]]`` or ``\boxed{ }``.
        is_labelled: whether it has the word score, rating or grade as a label.
    """

    examples: tuple[str, ...]
    pattern: re.Pattern[str]
    needs_scale: bool = False
    is_labelled: bool = False


def _form(
    pattern: str, *examples: str, needs_scale: bool = False, is_labelled: bool = False, flags: int = 0
) -> ScoreForm:
    return ScoreForm(examples, re.compile(pattern, re.IGNORECASE | flags), needs_scale, is_labelled)


SCORE_FORMS = (
    _form(
        rf"{_WORD}{_CONTEXT}{_COLON}{_OPEN}{_VALUE}",
        *(
            "Score: 7",
            "**Score:** 7/10",
            "Rating: [[7]]",
            "Score (0-10): 7",
            '{"score": 7}',
            "Grade = 7",
            "| Score | 7 |",
        ),
        is_labelled=True,
    ),
    _form(rf"<(?:\w{{1,20}}_)?(?:score|rating|grade)>{_OPEN}{_VALUE}", "<score>7</score>", is_labelled=True),
    _form(rf"{_WORD}[ \t]?(?=[(\[]){_OPEN}{_VALUE}(?!{_CLOSE}\s?:)", "Score (7)", "Score [[7]]", is_labelled=True),
    _form(
        rf"{_LINE}{_KIND}{{0,3}}(?:score|rating){_CONTEXT}\s{{0,4}}(?<=\s){_OPEN}{_VALUE}{_WHOLE}",
        *("Score 7", "### Score\n\n7"),
        is_labelled=True,
        flags=re.MULTILINE,
    ),
    _form(
        rf"(?:{_KIND}|(?:answer|response|solution)['\u2019]s\s+|{_LINE}){_WORD}(?:\s+(?:of|at|as)|(?:\s+(?:for|of|that|I|we)\b{_CLAUSE}{{0,60}}?)?"
        rf"\s+(?:is|was|equals|should\s+be|will\s+be)){_SO}{_OPEN}{_VALUE}{_PROSE_END}",
        *("a score of 7 out of 10", r"the score is \boxed{7}", "The rating for this answer is therefore 7."),
        flags=re.MULTILINE,
    ),
    _form(
        rf"\b(?:(?:I|we)\b{_CLAUSE}{{0,24}}?\b(?:giv(?:e|ing)|gave|rat(?:e|ed|ing)|"
        r"grad(?:e|ed|ing)|scor(?:e|ed|ing)|award(?:ing)?|assign(?:ing)?|say|go(?:ing)?\s+(?:with|for))"
        r"|(?:answer|response|solution|it|this)\s+(?:deserves|merits|warrants|earns|gets|receives|scores|is\s+rated))\b"
        rf"{_CLAUSE}{{0,60}}?[\s:]{_OPEN}{_VALUE}{_PROSE_END}",
        *("I rate this answer 7/10.", "I would give it 7 out of 10 points", "The response deserves a 7/10"),
        needs_scale=True,
    ),
    _form(
        rf"(?:{_LINE}|(?<=[.!]\s))(?:(?:my|the|so|thus|hence|therefore|final|overall|total|verdict|assessment|evaluation|judgment|judgement|quality|"
        rf"correctness|is)\b[\s,:{_MARKUP}]{{0,4}}){{0,4}}{_OPEN}{_VALUE}(?:\spoints)?{_CLOSE}[.!]?\s*\Z",
        *("7/10", r"\boxed{7}", "[[7]]", "Overall: 7 out of 10.", "Final verdict: [[7]]"),
        needs_scale=True,
        flags=re.MULTILINE,
    ),
)
"""All forms. The last score counts; the last form is a line or a sentence of its own, at the end."""

_LABEL = re.compile(rf"{_LINE}{_KIND}{{0,3}}{_WORD}{_CONTEXT}[:=\uff1a]", re.IGNORECASE | re.MULTILINE)
_IN_BRACKETS = re.compile(r"(?:\[\[|\\boxed\{)[^\n]{0,12}\Z")
_BLOCK_END = re.compile(r"\n[ \t]*(?:\$\$|```|\\\]|</\w{1,20}>)\Z")
"""A line that only ends a block, behind the last line that says something."""

_CLAUSE_ENDS = re.compile(
    r"[,;:()\u2013\u2014\n]|[.!?](?=\s)|\s-\s|[-=]>|\u2192|\b(?:so|but|thus|therefore|hence|and|because|yet)\b",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(r"\n|[.!?](?=\s)")
_NOT_GIVEN = re.compile(
    r"\b(?:not|\w{1,8}n['\u2019]t|never|cannot|refuse|no\s+way|nothing|nobody|far\s+from|short\s+of|only|"
    r"(?:an?|any|every|each)\s+(?:\w+\s+)?(?:answer|response|solution)|answers|responses|rubric|neither|nor|hardly|rather\s+than|instead\s+of|\w{1,8}er\s+than|"
    r"(?:less|more)\s+than|below|above|at\s+(?:most|least|best)|up\s+to|between|could|might|may|maybe|perhaps|"
    r"(?<!\bI\s)(?<!\bwe\s)would|unlike|previous|example|such\s+as|itself|wants?|wanted|asks?|asked|"
    r"tells?|told|tempted|inclined|another|claims?|says|states|ends|"
    r"contains|includes|mentions|quotes|writes|wrote|reads|demands|requests|instruct(?:s|ed)|before|to\s+(?:write|output|earn|"
    r"get|receive|reach|achieve|deserve|merit)|for\s+an?\s+(?:score|rating|grade))\b",
    re.IGNORECASE,
)
"""Words of a clause that gives no score."""

_CONDITION = re.compile(r"\b(?:if|unless|had\s+it|were\s+it|otherwise|suppose|assuming)\b", re.IGNORECASE)
_OTHER_SCORE = re.compile(
    r"\b(?:max(?:imum|imal)?|min(?:imum|imal)?|highest|lowest|best|top|possible|perfect|full|passing|no|without|any|"
    r"previous|old|example|sample|human|rubric|format|instance|e\.g|like)[\W_]{1,3}(?:(?:possible|total|overall|final)[\s_]{1,3})?(?:score|rating|grade)\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(
    r"\w[^\n]*(?<![\w\"'`\u201c])[\"'`\u201c\u00ab]\W{0,3}(?:\w{1,12}\s+){0,3}(?:score|rating|grade)(?![\"'`\w])[^\n\"`]*\Z",
    re.IGNORECASE,
)
"""Spoken of within a sentence: I was asked to write "Score: 7"."""

_LOOKED_BACK = 200
"""Characters before a number in which the clause that it stands in is looked for."""


@dataclass(frozen=True, slots=True)
class _ScoreMatch:
    """A score in a text: its value, out of how many (0: it does not say), where it stands, and whether by a label."""

    value: float
    scale: float
    start: int
    is_labelled: bool


def find_score(answer: str, *, full_score: float) -> float | None:
    """The last score that an answer states, in any form of the table; None if there is none, or no certain one.

    A label comes before prose; but where prose that follows it states another score, neither is certain, and so where a
    later label has no number.

    Args:
        answer: text of a judge, without its thinking.
        full_score: largest score; one that is out of another number is on another scale.

    Raises:
        DataError: the score is on another scale.
    """
    text = answer.rstrip()
    while ending := _BLOCK_END.search(text, max(0, len(text) - _LOOKED_BACK)):
        text = text[: ending.start()].rstrip()
    found = [one for form in SCORE_FORMS for one in _matches(form, text, full_score)]
    if not found:
        return None
    labelled = [one for one in found if one.is_labelled] or found
    last = max(labelled, key=lambda one: one.start)
    others = (one for one in found if one.start > last.start and one.value != last.value)
    if any(others) or any(label.start() > last.start for label in _LABEL.finditer(text)):
        return None
    if last.scale not in (0.0, full_score):
        raise DataError(
            f"the judge wrote a score of {last.value:g} out of {last.scale:g}; expected 0 to {full_score:g}"
        )
    return last.value


def _matches(form: ScoreForm, text: str, full_score: float) -> Iterator[_ScoreMatch]:
    for found in form.pattern.finditer(text):
        groups, start = found.groupdict(), found.start("score")
        scale = 100.0 if groups.get("percent") else float(groups.get("scale") or 0.0)
        before = text[max(0, start - _LOOKED_BACK) : start]
        if form.needs_scale and scale != full_score and not _IN_BRACKETS.search(before):
            continue
        if _is_given(before, found.start() - start):
            yield _ScoreMatch(float(found["score"].replace(",", ".")), scale, start, form.is_labelled)


def _is_given(before: str, form_start: int) -> bool:
    """Whether a number is a score that is given, and not denied, supposed, spoken of, or the end of a scale.

    Args:
        before: the text before the number.
        form_start: beginning of the form that it stands in, counted from the number: 0 or less.
    """
    form_at = max(0, len(before) + form_start)
    sentence = before[_end_of(_SENTENCE_ENDS, before[:form_at]) :]
    clause = before[_end_of(_CLAUSE_ENDS, before[:form_at]) :]
    line = before[before.rfind("\n", 0, form_at) + 1 :]
    return not (
        _NOT_GIVEN.search(clause)
        or _CONDITION.search(sentence)
        or any(found.end() > form_at for found in _OTHER_SCORE.finditer(before))
        or _QUOTED.search(line)
    )


def _end_of(pattern: re.Pattern[str], text: str) -> int:
    return max((found.end() for found in pattern.finditer(text)), default=0)
