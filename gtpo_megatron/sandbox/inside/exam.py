"""Runs the tests of a problem in one process on a program that is loaded in another (see :mod:`.link`).

The process of the tests has its own Python: no name, module or object of it is the program's, so that nothing which the
program changes changes a test. Runs inside the sandbox; needs the standard library only.
"""

import builtins
import os
import re
import sys
import types
import unittest

from gtpo_megatron.sandbox.inside import prelude, pytest_shapes
from gtpo_megatron.sandbox.inside.link import Link, ProgramExit, last_line
from gtpo_megatron.sandbox.inside.remotes import Mirror
from gtpo_megatron.sandbox.inside.values import EndedError

MODULES = ("solution", "submission", "program", "candidate", "main", "your_module")
"""Modules as which tests may import the program."""


class Names(dict):
    """The names of the tests: their own, then the program's, then the prelude's, then Python's."""

    def __init__(self, exam, own):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self.exam, self.own = exam, own

    def __missing__(self, name):
        if name not in self.own and name in self.exam.supplied:
            return self.exam.supplied[name]
        if name in self.exam.program_names and (name in self.own or not hasattr(builtins, name)):
            return self.exam.named(name)
        if name in prelude.NODES and name not in self.own:
            return self.exam.named(name)
        raise KeyError(name)

    def get(self, name, default=None):
        """A name of the tests' own."""
        return super().get(name, default)


class ProgramModule(types.ModuleType):
    """The program, as its tests import it."""

    def __init__(self, name, exam):
        super().__init__(name)
        vars(self)["_exam"] = exam

    def __getattr__(self, name):
        exam = vars(self)["_exam"]
        if name == "__all__":
            hidden = {*vars(builtins), *exam.supplied} - set(exam.own)
            return [one for one in exam.program_names if not one.startswith("_") and one not in hidden]
        if name.startswith("__") or name not in exam.program_names:
            raise AttributeError(f"the program has no {name}")
        return exam.named(name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            vars(self)["_exam"].link.ask("set_global", name=name, args=(value,))

    def __delattr__(self, name):
        vars(self)["_exam"].link.ask("delete_global", name=name)


class Main(types.ModuleType):
    """``__main__`` of the tests."""

    def __init__(self, names):
        super().__init__("__main__")
        vars(self)["_names"] = names

    def __getattr__(self, name):
        try:
            return vars(self)["_names"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Exam:
    """The tests of one program.

    Args:
        link: to the program.
        supplied: names of the prelude that tests may use.
    """

    def __init__(self, link, supplied):
        self.link, self.supplied = link, supplied
        self.program_names, self.own = set(), ()
        self.words = set()
        self.texts = {}
        input_here = builtins.input
        link.served = {
            "input": lambda _, prompt: (builtins.input if builtins.input is not input_here else read_line)(prompt),
            "read": lambda _: sys.stdin.readline(),
        }
        for name in MODULES:
            sys.modules[name] = ProgramModule(name, self)
        sys.modules["pytest"] = pytest_shapes.module()
        unittest.main = unittest.TestProgram = lambda *_, **__: None

    def wait_until_loaded(self):
        """Waits for the program; "" once it is loaded, else why it is not."""
        while "op" in (message := self.link.receive()):
            self.link.serve(message)
        if "unloaded" in message:
            return str(message["unloaded"]) or "it does not load"
        self.program_names = {str(name) for name in message["loaded"]}
        return ""

    def named(self, name):
        """Returns the program's value of a name; a class that does not only hold functions is marked as named."""
        value = self.link.ask("global", name=name)
        if isinstance(value, Mirror) and name in self.words - {"Solution"}:
            self.link.named.add(value._key)
        return value

    def status(self, case):
        """The status of a test and a detail."""
        self.own = tuple(case["own"])
        try:
            names = self.read(case) if case["test"] else None
            before = self.link.num_asked
            if names is None:
                self.executed(case["code"])
            else:
                self.run(names, case["test"])
        except unittest.SkipTest as error:
            if not self.link.is_theirs(error):
                return "skipped", str(error)
            return "error", last_line(error)
        except EndedError:
            raise
        except BaseException as error:
            return "error", last_line(error)
        return ("ok" if self.link.num_asked > before else "unused"), ""

    def read(self, case):
        """The names of a text of tests, which is executed once."""
        found = self.texts.get(case["code"])
        if found is None:
            try:
                found = self.executed(case["code"])
            except EndedError:
                raise
            except BaseException as error:
                found = error
            self.texts[case["code"]] = found
        if isinstance(found, BaseException):
            raise found
        return found

    def executed(self, text):
        """The names of a text of tests."""
        self.words.update(re.findall(r"\w+", text))
        names = Names(self, self.own)
        sys.modules["__main__"] = Main(names)
        try:
            exec(compile(text, "tests.py", "exec", dont_inherit=True), names)
        except SystemExit as error:
            if isinstance(error, ProgramExit) or error.code not in (None, 0):
                raise
        return names

    def run(self, names, test):
        """Runs one test: a function, a method, or all of a class."""
        sys.modules["__main__"] = Main(names)
        owner_name, _, name = test.rpartition(".")
        if not owner_name and not isinstance(names.get(name), type):
            return pytest_shapes.run(names, names[name])
        owner = names[owner_name or name]
        if not issubclass(owner, unittest.TestCase):
            return pytest_shapes.run(names, getattr(owner, name), owner)
        loader = unittest.defaultTestLoader
        suite = unittest.TestSuite([owner(name)]) if owner_name else loader.loadTestsFromTestCase(owner)
        result = Result()
        suite.run(result)
        for error in result.raised:
            raise error
        if result.unexpectedSuccesses:
            raise AssertionError("it passes, and should fail")
        if len(result.skipped) >= max(result.testsRun, 1):
            raise unittest.SkipTest(result.skipped[0][1])
        if not result.testsRun:
            raise AssertionError("no test was run")
        return None


class Result(unittest.TestResult):
    """A result that keeps exceptions as they are."""

    def __init__(self):
        super().__init__()
        self.raised = []

    def addError(self, test, err):
        """Keeps what was raised."""
        self.raised.append(err[1])

    def addFailure(self, test, err):
        """Keeps what was raised."""
        self.raised.append(err[1])

    def addSubTest(self, test, subtest, err):
        """Keeps what was raised."""
        if err is not None:
            self.raised.append(err[1])


def read_line(prompt):
    """A line of the tests' standard input."""
    sys.stdout.write(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.rstrip("\n")


def examine(cases, supplied, reading, writing, report):
    """Reports the status and a detail of each test on the program at the other end."""
    exam = Exam(Link(reading, writing, is_guarded=True), supplied)
    try:
        if said := exam.wait_until_loaded():
            report("unloaded", said)
            return
    except EndedError:
        report("unloaded", "the program ended while it was loaded")
        return
    try:
        for case in cases:
            report(*exam.status(case))
    except EndedError as error:  # this case's end is that of the process; the others are begun anew
        os.write(2, f"the program ended in the test: {error}".encode())
