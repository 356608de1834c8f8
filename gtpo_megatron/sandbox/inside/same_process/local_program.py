"""A program in the process of its tests, as people run them, once the static check has found nothing against it.

What lies in the process before the program comes is made unchangeable first (:mod:`.immutable_classes`). Runs inside
the sandbox; needs the standard library only.
"""

import builtins
import linecache
import sys
import types
import unittest.mock

from gtpo_megatron.sandbox.inside.program import prepare
from gtpo_megatron.sandbox.inside.same_process import guards, immutable_classes
from gtpo_megatron.sandbox.inside.same_process.guards import NAME
from gtpo_megatron.sandbox.inside.testing.names import TestedProgram
from gtpo_megatron.sandbox.inside.testing.runner import TestRunner
from gtpo_megatron.sandbox.inside.tracebacks import one_line

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
            return program.given([one for one in public if type(one) is str])

    return ProgramModule(NAME)


class LocalProgram(TestedProgram):
    """A program in this process; see the base for its arguments."""

    def __init__(self, imports, supplied, pythons):
        super().__init__(imports, supplied, pythons)
        self.module = module_of(self)
        self.space = vars(self.module)

    def load(self, codes):
        """Executes the program."""
        for name in (NAME, "program"):
            sys.modules[name] = self.module
        self.space["__file__"] = "program.py"
        for code in codes:
            exec(code, self.space)
        self.names = {name for name in self.space if not name.startswith("__")}
        self.imports = {name: place for name, place in self.imports.items() if name in self.space}

    def named(self, name):
        """Its value of a name."""
        self.used += 1
        if name in self.space:
            return self.space[name]
        return vars(builtins)[name]


def freeze():
    """Freezes all classes, but those of what runs the tests; whether it could.

    What patches for tests may still change any class.
    """
    if not immutable_classes.can_freeze():
        return False
    patching = [unittest.mock]
    if "_pytest.monkeypatch" in sys.modules:
        patching.append(sys.modules["_pytest.monkeypatch"])
    for module in patching:
        module.setattr, module.delattr = immutable_classes.thawed(setattr), immutable_classes.thawed(delattr)
    _freeze_new()
    return True


def _freeze_new():
    """Freezes the classes of all modules that are loaded, if there are any since it was done last."""
    if len(sys.modules) != LOADED[0]:
        immutable_classes.freeze(
            kind for kind in immutable_classes.classes() if kind.__module__.partition(".")[0] not in RUNNING
        )
        LOADED[0] = len(sys.modules)


def run_tests(texts, cases, checked, *, for_program, supplied, report, session):
    """Loads a program and runs its tests.

    Args:
        texts: texts of the program, by the names of their files.
        cases: see :meth:`.runner.TestRunner.run`.
        checked: result of the static check.
        for_program: names of its prelude, with their values.
        supplied: names of the prelude that tests may use.
        report: see :class:`.runner.TestRunner`.
        session: likewise.
    """
    pythons = dict(vars(builtins))
    _freeze_new()
    prepare()
    vars(builtins).update({name: value for name, value in for_program.items() if name not in checked.own_names})
    program = LocalProgram(checked.imports, supplied, pythons)
    codes, found = guards.codes_of(texts, report)
    for name, text in texts.items():  # for tests that ask for a program's source
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    vars(builtins).update(found)
    try:
        program.load(codes)
    except BaseException as error:
        report({"unloaded": one_line(error)})
        return
    TestRunner(program, report, session).run(cases)
