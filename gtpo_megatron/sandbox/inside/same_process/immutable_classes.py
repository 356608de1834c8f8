"""Makes classes unchangeable: those that lie in an interpreter before a program comes stay as they are.

What sets an attribute of such a class raises TypeError, whoever asks for it: an assignment, a decorator such as
``dataclass(Counter)``, ``setattr``. CPython has a flag for it (``Py_TPFLAGS_IMMUTABLETYPE``), which its own classes in
C have. Runs inside the sandbox; needs the standard library only.
"""

import ctypes
import sys

IMMUTABLE = 1 << 8
FLAGS_AT = object.__basicsize__ + 19 * ctypes.sizeof(ctypes.c_void_p)
"""Place of ``tp_flags`` in a class: after the head of a variable object and eighteen fields of one word each."""

FROZEN: list = []


def can_freeze():
    """Whether the flag is where it should be, in this interpreter."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 10):
        return False

    class Tried:
        """A class of no other use."""

    if any(_flags(kind).value != kind.__flags__ for kind in (Tried, int, object, type)):
        return False
    _flags(Tried).value |= IMMUTABLE
    try:
        Tried.name = 1
    except TypeError:
        return True
    return False


def classes():
    """All classes made in Python that are there and can be changed."""
    found, waiting = set(), [object]
    while waiting:
        kind = waiting.pop()
        for one in type.__subclasses__(kind):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return [kind for kind in found if not kind.__flags__ & IMMUTABLE]


def freeze(kinds):
    """Makes classes unchangeable, until they are thawed."""
    for kind in kinds:
        _flags(kind).value |= IMMUTABLE
        FROZEN.append(kind)


def thaw():
    """Makes all classes changeable that were frozen."""
    for kind in FROZEN:
        _flags(kind).value &= ~IMMUTABLE
    FROZEN.clear()


def thawed(change):
    """A ``setattr`` or ``delattr`` for those who may change a class: what patches for tests."""

    def changed(target, *given):
        if not isinstance(target, type) or not target.__flags__ & IMMUTABLE or target.__module__ == "builtins":
            return change(target, *given)
        flags = _flags(target)
        flags.value &= ~IMMUTABLE
        try:
            return change(target, *given)
        finally:
            flags.value |= IMMUTABLE

    return changed


def _flags(kind):
    return ctypes.c_ulong.from_address(id(kind) + FLAGS_AT)
