"""Runs the tests of a problem on a program, which is in the same interpreter or at the other end of a :mod:`.link`.

No name of the tests is the program's before they ask for it. Runs inside the sandbox; needs the standard library, and
pytest for texts in which pytest could find a test.
"""

import ast
import importlib
import importlib.util
import json
import os
import sys
import types
import unittest

from gtpo_megatron.sandbox.inside import prelude, pytest_session, written_text
from gtpo_megatron.sandbox.inside.link import ProgramExit, last_line

MODULES = ("solution", "submission", "program", "candidate", "main", "your_module")
"""Modules as which tests may import the program, besides any name under which no other module is found."""

KEPT = frozenset(
    (
        "ChainMap",
        "Counter",
        "OrderedDict",
        "defaultdict",
        "deque",
        "date",
        "datetime",
        "timedelta",
        "Decimal",
        "Fraction",
    )
)
"""Names of a prelude that no program takes the place of: of classes whose objects tests compare."""

ALIASES = {"np": "numpy", "pd": "pandas"}
"""Names that tests use for packages, although their program may be the one that imports them."""


def is_given(name):
    """Whether ``from solution import *`` gives a name: none of a module, and none that means something to pytest."""
    is_hook = name.startswith(("_", "pytest", "setup", "setUp", "teardown", "tearDown"))
    return (
        not is_hook and name not in ALIASES and name not in ("mock", "unittest") and name not in sys.stdlib_module_names
    )


class Names(dict):
    """The names of the tests: their own, then the program's, then the prelude's, then Python's.

    Args:
        program: see :class:`Tests`.
        case: its ``own`` says which names of the prelude or of Python are the program's.
        supplied: names of the prelude.
        pythons: Python's own, without what a prelude puts there for a program.
    """

    def __init__(self, program, case, supplied, pythons):
        super().__init__({"__name__": "__main__", "__builtins__": pythons, "__doc__": None, "__file__": "/tests.py"})
        super().__setitem__(written_text.CHECK, written_text.checked_manager)
        self.program, self.own, self.supplied, self.kept = program, case["own"], supplied, KEPT & supplied.keys()

    def __missing__(self, name):
        program, is_pythons = self.program, name in self["__builtins__"]
        if name in self.own:
            if name in program.names:
                return program.named(name)
        elif name in program.imports and not is_pythons:  # the tests were written for a file with these imports
            return program.imported(name)
        elif name in ALIASES and importlib.util.find_spec(ALIASES[name]) is not None:
            return importlib.import_module(ALIASES[name])
        elif name in prelude.NODES or (name in program.names and not is_pythons and name not in self.kept):
            return program.named(name)
        elif name in self.supplied:
            return self.supplied[name]
        raise KeyError(name)

    def get(self, name, default=None):
        """A name of the tests' own."""
        return super().get(name, default)


class Main(types.ModuleType):
    """The module of the tests, whose names are those of :class:`Names`."""

    def __init__(self, names):
        super().__init__("__main__")
        object.__setattr__(self, "_names", names)

    @property
    def __dict__(self):
        return object.__getattribute__(self, "_names")

    def __getattribute__(self, name):
        names = object.__getattribute__(self, "_names")
        if name == "__dict__":
            return names
        if name in names:  # what the tests bind themselves: pytest asks for names that mean something to it
            return names.get(name)
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        object.__getattribute__(self, "_names")[name] = value

    def __delattr__(self, name):
        del object.__getattribute__(self, "_names")[name]

    def __dir__(self):
        return list(object.__getattribute__(self, "_names"))


class Tests:
    """The tests of one program.

    Args:
        program: has ``names`` and ``imports`` of the program, gives what it is ``named`` or has ``imported``, is a
            ``module`` for tests to import, knows whether it was ``used`` and ``has_ended``, and whether an exception
            ``is_theirs``, of the tests.
        supplied: names of the prelude that tests may use.
        pythons: see :class:`Names`.
        report: says what became of a case and its tests.
        session: of pytest, or why there is none.
    """

    def __init__(self, program, supplied, pythons, report, session):
        self.program, self.supplied, self.pythons = program, supplied, pythons
        self.report, self.session = report, session
        for name in MODULES:
            sys.modules[name] = program.module
        unittest.main = unittest.TestProgram = lambda *_, **__: None

    def run(self, cases):
        """Reports on all cases; the first may have tests that were run before.

        Args:
            cases: each with its ``number``, ``code``, ``own``, whether it ``expects`` tests, and how many to ``skip``.
        """
        for case in cases:
            self._run_case(case)
            if self.program.has_ended:  # this test's end is that of the process; the others are begun anew
                os.write(2, b"the program ended in the test")
                return

    def _run_case(self, case):
        number, before = case["number"], self.program.used
        try:
            items, seen = self._collected(case)
        except BaseException as error:
            if not self.program.has_ended:
                self.report({"case": number, "status": self._status_of(error), "detail": last_line(error)})
            return
        if not items:
            self.report({"case": number, "status": "ok" if self.program.used > before else "unused"})
            return
        self.report({"case": number, "collected": len(items)})
        for at in range(case["skip"], len(items)):
            begun = self.program.used if self.program.counts_tests else before
            status, detail = pytest_session.run(self.session, items, at, seen)
            if self.program.has_ended:
                return
            if status == "ok" and self.program.used <= begun:
                status = "unused"
            name = items[at].nodeid.partition("::")[2]
            self.report({"case": number, "test": name, "status": status, "detail": detail})
        self.report({"case": number, "status": "done"})

    def _collected(self, case):
        """The tests that pytest finds in a text, which is executed, and what it says of them."""
        names, module = self._executed(case)
        items, seen = [], None
        if pytest_session.is_collectable(names):
            if isinstance(self.session, str):
                raise ImportError(self.session)
            items, seen = pytest_session.collected(self.session, module)
            if seen.uncollected:
                raise AssertionError(seen.uncollected[0])
        if case["expects"] and not items:
            raise AssertionError("pytest finds no test in it")
        return items, seen

    def _status_of(self, error):
        outcomes = sys.modules.get("_pytest.outcomes")
        is_skip = isinstance(error, (unittest.SkipTest, *([outcomes.Skipped] if outcomes else [])))
        return "skipped" if is_skip and self.program.is_theirs(error) else "error"

    def _executed(self, case):
        """The names of a text of tests, and their module."""
        text = case["code"]
        tree = ast.parse(text, "tests.py")
        self._put_program_under(written_text.imported_modules(tree))
        self.program.hides(written_text.own_names(tree), case["own"])
        code = written_text.changed(tree)
        names = Names(self.program, case, self.supplied, self.pythons)
        module = sys.modules["__main__"] = Main(names)
        try:
            exec(code, names)
        except SystemExit as error:
            if isinstance(error, ProgramExit) or error.code not in (None, 0) or of_program(error):
                raise
        return names, module

    def _put_program_under(self, modules):
        """Makes the program what tests import by a name under which nothing else is found, unless they name it so.

        Args:
            modules: see :func:`.written_text.imported_modules`.
        """
        missing = [one for one in modules if self._is_missing(one)]
        if any(name.partition(".")[0] in MODULES for name in modules):
            return
        needed = [name for name in missing if modules[name] is None]
        for name in needed or [name for name in missing if self.program.names & set(modules[name])]:
            parts = name.split(".")
            for number in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:number])] = self.program.module

    @staticmethod
    def _is_missing(name):
        """Whether no module is found under a name."""
        first = name.partition(".")[0]
        if first in sys.modules or first in sys.stdlib_module_names:
            return False
        try:
            return importlib.util.find_spec(first) is None
        except (ImportError, ValueError):
            return True


def of_program(error):
    """Whether an exception has passed the program."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program.py":
            return True
        trace = trace.tb_next
    return False


def reporter(nonce):
    """A function that reports by lines on descriptor 3, which nobody else can begin so."""

    def report(said):
        os.write(3, json.dumps({"nonce": nonce} | said).encode("utf-8", "replace") + b"\n")

    return report


def read_line(prompt):
    """A line of the tests' standard input."""
    sys.stdout.write(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.rstrip("\n")
