"""Runs the tests of a problem on a program, and reports what became of each.

Runs inside the sandbox; needs the standard library, and pytest for texts in which pytest could find a test.
"""

import ast
import os
import sys
import unittest

from gtpo_megatron.sandbox.inside.testing import pytest_session, text_of_tests
from gtpo_megatron.sandbox.inside.testing.names import PROGRAM_MODULES, ModuleOfTests, NamesOfTests, is_other
from gtpo_megatron.sandbox.inside.tracebacks import PROGRAM, ProgramExit, lines_in, one_line


class TestRunner:
    """Runs the tests of one program.

    Args:
        program: a :class:`.names.TestedProgram`.
        report: takes the fields of a report, see :mod:`.reports`.
        session: session of pytest, or why there is none.
    """

    __test__ = False

    def __init__(self, program, report, session):
        self.program, self.report, self.session = program, report, session
        for name in PROGRAM_MODULES:
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
                self.report({"case": number, "status": self._status_of(error), "detail": one_line(error)})
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
        tree = ast.parse(case["code"], "tests.py")
        self._put_program_under(text_of_tests.imported_modules(tree))
        self.program.hides(text_of_tests.own_names(tree), case["own"])
        code = text_of_tests.changed(tree)
        names = NamesOfTests(self.program, case["own"])
        names[text_of_tests.CHECK] = text_of_tests.checked_manager
        module = sys.modules["__main__"] = ModuleOfTests(names)
        try:
            exec(code, names)
        except SystemExit as error:
            if isinstance(error, ProgramExit) or error.code not in (None, 0) or lines_in(PROGRAM, error):
                raise
        return names, module

    def _put_program_under(self, modules):
        """Makes the program what tests import by a name under which nothing else is found, unless they name it so.

        Args:
            modules: see :func:`.text_of_tests.imported_modules`.
        """
        if any(name.partition(".")[0] in PROGRAM_MODULES for name in modules):
            return
        missing = [name for name in modules if not is_other(name)]
        needed = [name for name in missing if modules[name] is None]
        for name in needed or [name for name in missing if self.program.names & set(modules[name])]:
            parts = name.split(".")
            for number in range(1, len(parts) + 1):
                sys.modules[".".join(parts[:number])] = self.program.module
