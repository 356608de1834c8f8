"""A plain program (:mod:`.plain`) in the interpreter of its tests, as people run them.

What lies in the interpreter before the program comes is made unchangeable first (:mod:`.frozen`). Runs inside the
sandbox; needs the standard library only.
"""

import builtins
import importlib
import linecache
import sys
import types
import unittest.mock

from gtpo_megatron.sandbox.inside import frozen, guarded, program
from gtpo_megatron.sandbox.inside.guarded import NAME
from gtpo_megatron.sandbox.inside.link import last_line
from gtpo_megatron.sandbox.inside.test_runner import KEPT, Tests, is_given

RUNNING = ("_pytest", "pytest", "pluggy", "pytest_asyncio", "pytest_mock")
"""Packages of what runs the tests: they change their own classes, and no program gets hold of one."""

LOADED = [0]
"""Modules that were loaded when classes were frozen."""


def module_of(program):
    """The module of a program, which tells it that somebody looks into it, and what ``*`` gives.

    The program itself sees its module's names only: nothing of this is among them.
    """

    class ProgramModule(types.ModuleType):
        def __getattribute__(self, name):
            program.used += 1
            if name != "__all__":
                return super().__getattribute__(name)
            space = super().__getattribute__("__dict__")
            public = space.get("__all__") or [one for one in space if not one.startswith("_")]
            return [one for one in public if type(one) is str and program.gives(one)]

    return ProgramModule(NAME)


class LoadedProgram:
    """A program in this interpreter.

    Args:
        supplied: names of the prelude that tests may use.
        pythons: Python's own names.
    """

    counts_tests = False
    has_ended = False

    def __init__(self, supplied, pythons):
        self.supplied, self.pythons = supplied, pythons
        self.used, self.hidden, self.own = 0, set(), set()
        self.imports = {}
        self.module = module_of(self)
        self.space = vars(self.module)

    def load(self, codes, imports):
        """Executes the program."""
        for name in (NAME, "program"):
            sys.modules[name] = self.module
        self.space["__file__"] = "program.py"
        for code in codes:
            exec(code, self.space)
        self.names = {name for name in self.space if not name.startswith("__")}
        self.imports = {name: place for name, place in imports.items() if name in self.space}

    def named(self, name):
        """Its value of a name."""
        self.used += 1
        if name in self.space:
            return self.space[name]
        return vars(builtins)[name]

    def imported(self, name):
        """What its text imports under a name, which is looked up again: the program may have put something there."""
        module, attribute = self.imports[name]
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    def is_theirs(self, _):
        """A plain program has no exception that skips a test."""
        return True

    def hides(self, names, own):
        """Says which names ``from solution import *`` does not give to these tests."""
        self.hidden, self.own = {*self.pythons, *(KEPT & self.supplied.keys()), *names}, set(own)

    def gives(self, name):
        """Whether ``*`` gives a name."""
        return name in self.own or (name not in self.hidden and (name in self.imports or is_given(name)))


def freeze():
    """Freezes all classes, but those of what runs the tests; whether it could.

    What patches for tests may still change any class.
    """
    if not frozen.can_freeze():
        return False
    patching = [unittest.mock]
    if "_pytest.monkeypatch" in sys.modules:
        patching.append(sys.modules["_pytest.monkeypatch"])
    for module in patching:
        module.setattr, module.delattr = frozen.thawed(setattr), frozen.thawed(delattr)
    _freeze_new()
    return True


def _freeze_new():
    """Freezes the classes of all modules that are loaded, if there are any since it was done last."""
    if len(sys.modules) != LOADED[0]:
        frozen.freeze(kind for kind in frozen.classes() if kind.__module__.partition(".")[0] not in RUNNING)
        LOADED[0] = len(sys.modules)


def examine(texts, cases, *, imports, own_names, for_program, supplied, report, session):
    """Loads a program and runs its tests.

    Args:
        texts: of the program, by the names of their files.
        cases: see :class:`.test_runner.Tests`.
        imports: what the program's text imports at its top.
        own_names: names that the program's module binds itself.
        for_program: names of its prelude.
        supplied: names of the prelude that tests may use.
        report: see :class:`.test_runner.Tests`.
        session: likewise.
    """
    pythons = dict(vars(builtins))
    _freeze_new()
    program.prepare()
    vars(builtins).update({name: value for name, value in for_program.items() if name not in own_names})
    loaded = LoadedProgram(supplied, pythons)
    codes, found = guarded.codes_of(texts, report)
    for name, text in texts.items():  # for tests that ask for a program's source
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    vars(builtins).update(found)
    try:
        loaded.load(codes, imports)
    except BaseException as error:
        report({"unloaded": last_line(error)})
        return
    Tests(loaded, supplied, pythons, report, session).run(cases)
