"""The module ``pytest`` as the tests of a problem know it: what they use of it, without its collection and reports.

Fixtures are made for each test. Runs inside the sandbox; needs the standard library only.
"""

import contextlib
import importlib
import inspect
import io
import itertools
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import types
import unittest

OFFERED = (
    "raises", "approx", "fixture", "mark", "param", "skip", "fail", "xfail", "exit", "main", "importorskip",
    "MonkeyPatch", "FixtureRequest", "CaptureFixture",
)  # fmt: skip
"""Names of ``pytest`` that are here; a row whose tests use others is refused when it is read."""

FIXTURES = ("capsys", "monkeypatch", "tmp_path", "request")
"""Fixtures that need no definition."""


class Failed(AssertionError):  # noqa: N818 - pytest's name
    """A test has failed."""


class XFailed(Exception):  # noqa: N818 - pytest's name
    """A test fails, as it should."""


class Raises:
    """``with pytest.raises(kind, match=...) as info``."""

    def __init__(self, kind, match=None):
        self.expected, self.match_of = kind, match
        self.value = self.type = self.tb = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            raise Failed(f"DID NOT RAISE {self.expected}")
        if not isinstance(error, self.expected):
            return False
        self.value, self.type, self.tb = error, kind, trace
        if self.match_of is not None:
            self.match(self.match_of)
        return True

    def match(self, pattern):
        """Raises unless the text of the exception has the pattern."""
        if not re.search(pattern, str(self.value)):
            raise Failed(f"{pattern!r} is not in {str(self.value)!r}")
        return True

    def __str__(self):
        return str(self.value)


def raises(kind, *args, match=None, **kwargs):
    """The context manager, or, with a callable, the call within it."""
    if not args:
        return Raises(kind, match)
    with Raises(kind) as found:
        args[0](*args[1:], **kwargs)
    return found


class Approx:
    """A number, or a collection of some, up to a tolerance."""

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok

    def _within(self, expected, actual):
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self._within(expected[key], actual[key]) for key in expected)
            )
        if hasattr(expected, "tolist"):
            expected = expected.tolist()
        if hasattr(actual, "tolist"):
            actual = actual.tolist()
        if isinstance(expected, list | tuple):
            return (
                isinstance(actual, list | tuple)
                and len(expected) == len(actual)
                and all(map(self._within, expected, actual))
            )
        is_number = isinstance(expected, int | float | complex) and not isinstance(expected, bool)
        if not is_number and not hasattr(expected, "__float__"):
            return type(expected) is type(actual) and expected == actual
        if isinstance(actual, bool | str) or not hasattr(actual, "__abs__"):
            return False
        if expected == actual:
            return True
        if expected != expected or actual != actual:
            return self.nan_ok and expected != expected and actual != actual
        if math.inf in (abs(expected), abs(actual)):
            return False
        relative = (1e-6 if self.rel is None and self.abs is None else self.rel or 0.0) * float(abs(expected))
        least = (1e-12 if self.rel is None or self.abs is None else 0.0) if self.abs is None else self.abs
        return bool(abs(expected - actual) <= max(relative, least))

    def __eq__(self, actual):
        return self._within(self.expected, actual)

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __repr__(self):
        return f"approx({self.expected!r})"


class Param:
    """One set of values of a parametrized test."""

    def __init__(self, *values, marks=(), id=None):
        self.values, self.marks, self.id = values, marks if isinstance(marks, list | tuple) else (marks,), id


class Mark:
    """A mark; called with a test it is put on it, called with anything else it is one with arguments."""

    def __init__(self, name, args=(), kwargs=None):
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
            args[0].pytestmark = [*getattr(args[0], "pytestmark", []), self]
            return args[0]
        return Mark(self.name, args, kwargs)


class Marks:
    """``pytest.mark``."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Mark(name)


class Fixture:
    """A function that makes what a test asks for by its name."""

    def __init__(self, function, params, autouse, name):
        self.function, self.params, self.autouse, self.name = function, params, autouse, name

    def __get__(self, instance, _):
        return self


def fixture(function=None, *, params=None, autouse=False, name=None, **_):
    """The decorator, with and without arguments; every scope is that of the test."""
    if function is None:
        return lambda it: fixture(it, params=params, autouse=autouse, name=name)
    return Fixture(function, params, autouse, name or function.__name__)


def skip(reason="", **_):
    """Skips the test."""
    raise unittest.SkipTest(reason)


def fail(reason="", **_):
    """Fails the test."""
    raise Failed(reason)


def xfail(reason="", **_):
    """The test fails, as it should."""
    raise XFailed(reason)


def importorskip(name, **_):
    """A module; the test is skipped if there is none."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise unittest.SkipTest(str(error)) from error


class Monkeypatch:
    """The fixture ``monkeypatch``: changes that end with the test."""

    def __init__(self):
        self.undone = contextlib.ExitStack()

    def setattr(self, target, name, *value, raising=True):
        """Sets an attribute of an object, or of what a dotted name names."""
        if isinstance(target, str):
            place, _, attribute = target.rpartition(".")
            return self.setattr(importlib.import_module(place), attribute, name, raising=raising)
        before = getattr(target, name, self)
        if before is self and raising:
            raise AttributeError(name)
        setattr(target, name, *value)
        self.undone.callback(*((delattr, target, name) if before is self else (setattr, target, name, before)))
        return None

    def setitem(self, mapping, name, value):
        """Sets an item of a mapping."""
        before = mapping.get(name, self)
        mapping[name] = value
        self.undone.callback(lambda: mapping.pop(name, None) if before is self else mapping.__setitem__(name, before))

    def chdir(self, path):
        """Changes the folder."""
        self.undone.callback(os.chdir, pathlib.Path.cwd())
        os.chdir(path)

    def undo(self):
        """Takes all changes back."""
        self.undone.close()


class Capture:
    """The fixture ``capsys``."""

    def __init__(self):
        self.before = sys.stdout, sys.stderr
        self.readouterr()

    def readouterr(self):
        """Returns the text written since the last call."""
        texts = [one.getvalue() if isinstance(one, io.StringIO) else "" for one in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return _Captured(*texts)

    def undo(self):
        """Puts the streams back."""
        sys.stdout, sys.stderr = self.before


class _Captured(tuple):
    __slots__ = ()

    def __new__(cls, out, err):
        return super().__new__(cls, (out, err))

    out = property(lambda self: self[0])
    err = property(lambda self: self[1])


class Values:
    """Arguments of one call of a test, by name; fixtures are made when they are asked for."""

    def __init__(self, names, instance, given, params):
        self.names, self.instance, self.values, self.params = names, instance, dict(given), params
        self.ends = contextlib.ExitStack()

    def of(self, name):
        """A value by its name."""
        if name not in self.values:
            self.values[name] = self.made(name)
        return self.values[name]

    def made(self, name):
        """A fixture."""
        if name in ("capsys", "monkeypatch"):
            found = Capture() if name == "capsys" else Monkeypatch()
            self.ends.callback(found.undo)
            return found
        if name == "tmp_path":
            path = tempfile.mkdtemp()
            self.ends.callback(shutil.rmtree, path, ignore_errors=True)
            return pathlib.Path(path)
        if name == "request":
            return types.SimpleNamespace(getfixturevalue=self.of, addfinalizer=self.ends.callback)
        made = self.names.get(name)
        if made is None:
            raise Failed(f"no fixture {name!r}")
        given = {one: self.of(one) for one in parameters(made.function) if one != "self"}
        if "request" in given:
            given["request"].param = self.params.get(name)
        value = bound(made.function, self.instance)(**given)
        if inspect.isgenerator(value):
            self.ends.callback(next, value, None)
            return next(value)
        return finished(value)


def finished(value):
    """A value; what can be awaited is."""
    if not inspect.isawaitable(value):
        return value

    import asyncio  # here, because it is slow, and rare

    async def wait():
        return await value

    return asyncio.run(wait())


def bound(function, instance):
    """A function of a class, of that instance."""
    return function if instance is None else types.MethodType(function, instance)


def parameters(function):
    """Names of the parameters that have no default."""
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]


def run(space, function, owner=None):
    """Runs a test once for each of its parameter sets; raises what it raises.

    Args:
        space: names of the tests.
        function: the test.
        owner: its class, if it has one.
    """
    marks = [*getattr(owner, "pytestmark", []), *getattr(function, "pytestmark", [])]
    module_marks = space.get("pytestmark", [])
    marks = [*(module_marks if isinstance(module_marks, list | tuple) else [module_marks]), *marks]
    _skipped(marks, space)
    fixtures = {one.name: one for one in space.values() if isinstance(one, Fixture)}
    if owner is not None:
        fixtures |= {one.name: one for name in dir(owner) if isinstance(one := getattr(owner, name), Fixture)}
    wanted = [one for one in parameters(function) if owner is None or one != "self"]
    wanted += [name for one in marks if one.name == "usefixtures" for name in one.args]
    used = {*wanted, *(one.name for one in fixtures.values() if one.autouse)}
    for name in [*used]:
        if name in fixtures:
            used.update(parameters(fixtures[name].function))
    makers = [
        [({}, {name: value}, ()) for value in fixtures[name].params]
        for name in sorted(used)
        if name in fixtures and fixtures[name].params
    ]
    sets = [_parametrized(one) for one in marks if one.name == "parametrize"]
    skips, count = [], 0
    for chosen in itertools.product(*sets, *makers):
        given = {name: value for values, _, _ in chosen for name, value in values.items()}
        params = {name: value for _, values, _ in chosen for name, value in values.items()}
        its_marks = [*marks, *(mark for _, _, some in chosen for mark in some)]
        try:
            _skipped(its_marks, space)
            _run_one(space, function, owner, Values(fixtures, None, given, params), (wanted, its_marks))
            count += 1
        except unittest.SkipTest as error:
            skips.append(error)
    if not count:
        raise skips[0] if skips else Failed("it has no parameters")


def _run_one(space, function, owner, values, how):
    wanted, marks = how
    instance = values.instance = None if owner is None else owner()
    with contextlib.ExitStack() as ends:
        ends.push(values.ends)
        _around(ends, instance, function, space)
        for one in list(values.names.values()):
            if one.autouse:
                values.of(one.name)
        for name in wanted:
            values.of(name)
        given = {name: values.of(name) for name in parameters(function) if instance is None or name != "self"}
        expected = [one for one in marks if one.name == "xfail" and _holds(one, space)]
        try:
            finished(bound(function, instance)(**given))
        except XFailed:
            return
        except Exception as error:
            kinds = expected[0].kwargs.get("raises", Exception) if expected else ()
            if not isinstance(error, kinds):
                raise
            return
        if expected and expected[0].kwargs.get("strict"):
            raise Failed("it passes, and should fail")


def _around(ends, instance, function, space):
    """Calls what stands around a test by its name, and leaves the second half for its end."""
    for name in ("module", "function") if instance is None else ("class", "method"):
        begin, end = f"setup_{name}", f"teardown_{name}"
        if instance is None:
            _pair(ends, space.get(begin), space.get(end), function)
        else:
            _pair(ends, getattr(instance, begin, None), getattr(instance, end, None), function)


def _pair(ends, begin, end, function):
    for one, is_end in ((begin, False), (end, True)):
        if one is None:
            continue
        args = (function,) if parameters(one) else ()
        if is_end:
            ends.callback(one, *args)
        else:
            one(*args)


def _parametrized(mark):
    """The sets of values of one mark: values, none for fixtures, and marks."""
    names, sets = (*mark.args, *([mark.kwargs["argvalues"]] if "argvalues" in mark.kwargs else []))[:2]
    if isinstance(names, str):
        names = [one.strip() for one in names.split(",") if one.strip()]
    found = []
    for one in sets:
        param = one if isinstance(one, Param) else Param(*(one if len(names) > 1 else (one,)))
        if len(param.values) != len(names):
            raise Failed(f"{len(param.values)} values for {names}")
        values = dict(zip(names, param.values, strict=True))
        is_indirect = bool(mark.kwargs.get("indirect"))
        found.append(({}, values, param.marks) if is_indirect else (values, {}, param.marks))
    return found


def _holds(mark, space):
    """The condition of a mark."""
    condition = mark.args[0] if mark.args else mark.kwargs.get("condition", True)
    return bool(eval(condition, dict(space)) if isinstance(condition, str) else condition)


def _skipped(marks, space):
    for one in marks:
        if one.name == "skip" or (one.name == "skipif" and _holds(one, space)):
            raise unittest.SkipTest(str(one.kwargs.get("reason", "")))


def module():
    """The module to import."""
    made = types.ModuleType("pytest")
    vars(made).update(
        raises=raises, approx=Approx, fixture=fixture, mark=Marks(), param=Param, skip=skip, fail=fail, xfail=xfail,
        importorskip=importorskip, MonkeyPatch=Monkeypatch, FixtureRequest=object, CaptureFixture=dict,
        main=lambda *_, **__: 0, exit=lambda *_, **__: None,
    )  # fmt: skip
    return made
