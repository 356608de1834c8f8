"""Whether an object of a program knows the value to which it is said to be equal (see :mod:`.operators`).

An object that equals everything is asked about values like the one of the tests as well, in any order, and must not be
equal to them. All differ at one place only, where each is as likely to be the one. Runs inside the sandbox; needs the
standard library only.
"""

import decimal
import fractions
import os
import string

from gtpo_megatron.sandbox.inside.values import EndedError

SIZE = 8
NUMBERS = (int, float, decimal.Decimal, fractions.Fraction)


def knows(value, is_equal):
    """Whether something is equal to a value, and to none of those like it.

    Args:
        value: of the tests.
        is_equal: asks about a value; what it raises about another value than that of the tests means that it is not.
    """
    asked = [value, *others(value)]
    while asked:
        one = asked.pop(picked(len(asked)))
        try:
            found = is_equal(one)
        except EndedError:
            raise
        except Exception:
            if one is value:
                raise
            found = False
        if found is not (one is value):
            return False
    return True


def picked(number):
    """A number below one; what the tests draw from ``random`` stays as it is."""
    return int.from_bytes(os.urandom(4), "big") % number


def others(value):
    """Values like one; none if it is of no kind that is known here."""
    found = []
    kind = type(value)
    if kind is bool:
        found = [not value]
    elif kind in NUMBERS:
        first = picked(SIZE)
        found = [value + at - first for at in range(SIZE)]
    elif kind is str:
        found = _texts(value)
    elif kind in (list, tuple):
        found = [kind([*value[:at], one, *value[at + 1 :]]) for at, one in _of_one(list(value))]
    elif kind is dict:
        keys = list(value) or ["a"]
        found = [value | {keys[at]: one} for at, one in _of_one(list(value.values()))]
    elif kind in (set, frozenset):
        items = list(value)
        found = [kind([*items[:at], one, *items[at + 1 :]]) for at, one in _of_one(items)]
    return [one for one in found if one != value]


def _texts(text):
    if not text:
        return list(string.ascii_lowercase[: SIZE - 1])
    at = picked(len(text))
    letters = string.digits if text[at].isdigit() else string.ascii_lowercase
    letters = letters if text[at].islower() or text[at].isdigit() else letters.upper()
    left = [one for one in letters if one.lower() != text[at].lower()]
    return [text[:at] + left.pop(picked(len(left))) + text[at + 1 :] for _ in range(SIZE - 1)]


def _of_one(items):
    """Places and other values of an element that has some; a collection that is empty gets an element."""
    if not items:
        return [(0, one) for one in range(SIZE - 1)]
    first = picked(len(items))
    for at in (*range(first, len(items)), *range(first)):
        if found := others(items[at]):
            return [(at, one) for one in found]
    return []
