"""Values that cross between two processes as JSON (see :mod:`.channel`), and what is looked up by a name.

Runs inside the sandbox; needs the standard library only.
"""

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import itertools
import operator
import pathlib
import sys
import uuid

EXACT = (bool, float, str, type(None))
LARGEST = 1 << 63
"""Integers from here on cross in hexadecimal, whose length Python does not limit."""

MUTABLE = {
    list: "list", dict: "dict", set: "set", collections.deque: "deque", collections.Counter: "Counter",
    collections.OrderedDict: "OrderedDict", collections.defaultdict: "defaultdict", bytearray: "bytearray",
}  # fmt: skip
IMMUTABLE = {tuple: "tuple", frozenset: "frozenset"}
KINDS = {name: kind for kind, name in (MUTABLE | IMMUTABLE).items()}
BUILTIN_BASES = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)

TEXTS: dict = {
    bytes: (bytes.hex, bytes.fromhex),
    complex: (lambda one: [one.real, one.imag], lambda given: complex(*given)),
    range: (lambda one: [one.start, one.stop, one.step], lambda given: range(*given)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (
        lambda one: [hex(one.numerator), hex(one.denominator)],
        lambda given: fractions.Fraction(*(int(one, 16) for one in given)),
    ),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda one: [one.days, one.seconds, one.microseconds],
        lambda given: datetime.timedelta(*given),
    ),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
    uuid.UUID: (str, uuid.UUID),
    type(Ellipsis): (lambda _: "", lambda _: ...),
    type(NotImplemented): (lambda _: "", lambda _: NotImplemented),
}
"""Values that cross by a text of their own, or a list: how it is made, and what is made of it."""
VIEWS: dict = {
    type({}.keys()): lambda given: dict.fromkeys(given).keys(),
    type({}.values()): lambda given: dict(enumerate(given)).values(),
    type({}.items()): lambda given: dict(given).items(),
}
"""Views of a dict, which cross by their values."""
FROM_TEXT = {kind.__name__: made for kind, (_, made) in TEXTS.items()}
FROM_VALUES = {kind.__name__: made for kind, made in VIEWS.items()}


INTRUDED = "it wrote into its connection"


class EndedError(Exception):
    """The other process has ended, or does not answer as it should."""


class Memo:
    """The collections of one request and its answer, by numbers that both sides use."""

    def __init__(self):
        self.keys = {}
        self.objects = {}
        self.before = {}
        self.is_lossy = False

    def add(self, value, key=None):
        """Numbers a collection."""
        key = len(self.objects) if key is None else key
        self.keys[id(value)] = key
        self.objects[key] = value
        return key

    def watch(self):
        """Remembers what is in the collections so far."""
        self.before = {key: elements(value) for key, value in self.objects.items()}

    def changed(self):
        """Numbers of the watched collections with other contents."""
        return [key for key, before in self.before.items() if not is_same(before, self.objects[key])]


def elements(value):
    """What is in a collection, by which it is found to be changed; no object is asked what it equals."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return bytes(value) if isinstance(value, bytearray) else list(value)


def is_same(then, value):
    """Whether the elements of a collection are still those."""
    if isinstance(value, bytearray):
        return then == value
    if isinstance(value, dict):
        return len(then) == 2 * len(value) and all(map(operator.is_, then, itertools.chain(value, value.values())))
    return len(then) == len(value) and all(map(operator.is_, then, value))


def builtin_value(value):
    """An object of a class that is made of ``list``, ``int`` or the like, as one of those."""
    for kind in BUILTIN_BASES:
        if isinstance(value, kind):
            if isinstance(value, dict):
                return dict(dict.items(value))
            if issubclass(kind, list | tuple | set | frozenset):
                return kind(kind.__iter__(value))
            if kind is str:
                return str.__str__(value)
            return {int: int.__int__, float: float.__float__}.get(kind, kind)(value)
    return value


def extra_of(value):
    """The length of a deque, or the name of a default dict's factory."""
    if isinstance(value, collections.deque):
        return value.maxlen
    factory = getattr(value, "default_factory", None)
    return factory.__name__ if isinstance(factory, type) else None


def made_empty(kind, extra):
    """An empty collection."""
    if kind == "deque":
        return collections.deque(maxlen=extra)
    if kind == "defaultdict":
        return collections.defaultdict(builtin_type(extra) if extra else None)
    return KINDS[kind]()


def is_builtin(kind):
    """Whether a class is Python's own; the names of a prelude lie there too."""
    return kind.__module__ == "builtins" and getattr(builtins, kind.__name__, None) is kind


def builtin_type(name):
    """A class of Python's own."""
    found = getattr(builtins, str(name), None)
    if not isinstance(found, type):
        raise EndedError(INTRUDED)
    return found


def stdlib_module(name, *, may_import):
    """A module of the standard library.

    Args:
        name: name of the module.
        may_import: else it must be loaded: to import a module is to run it, and some run what lies in the folder.
    """
    name = str(name)
    if name in ("__main__", "program") or name.partition(".")[0] not in sys.stdlib_module_names | {"numpy"}:
        raise AttributeError(f"no module {name}")
    if may_import:
        __import__(name)
    return sys.modules[name]


def known_error(given, *, may_import):
    """An exception class of the standard library, which is one class on both sides; None if it is none.

    That tests are skipped is for the tests to say: their modules' classes are left out.
    """
    with contextlib.suppress(Exception):
        found = getattr(stdlib_module(given["module"], may_import=may_import), str(given["name"]))
        if isinstance(found, type) and issubclass(found, BaseException):
            return None if found.__module__.partition(".")[0] in ("unittest", "doctest", "builtins") else found
    return None


def place_of(function):
    """Module and name of a function of the standard library."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    if isinstance(module, str) and isinstance(name, str) and module.partition(".")[0] in sys.stdlib_module_names:
        found = getattr(sys.modules.get(module), name, None)
        return [module, name] if found is function and module != "__main__" else None
    return None


def array_of(given):
    """An array of numpy."""
    import numpy  # here, because only some programs have it

    return numpy.frombuffer(bytearray.fromhex(given["v"]), dtype=numpy.dtype(given["d"])).reshape(given["s"])
