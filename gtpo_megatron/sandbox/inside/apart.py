"""A program in a process of its own, as its tests see it at the other end of a :mod:`.link`.

The process of the tests has its own Python: no name, module or object of it is the program's, so that nothing which the
program changes changes a test. Runs inside the sandbox; needs the standard library only.
"""

import ast
import builtins
import importlib
import importlib.util
import sys
import types

from gtpo_megatron.sandbox.inside.link import Link
from gtpo_megatron.sandbox.inside.remotes import Mirror
from gtpo_megatron.sandbox.inside.test_runner import MODULES, Tests, read_line
from gtpo_megatron.sandbox.inside.values import EndedError

PACKAGES = sys.stdlib_module_names | {"np", "pd", "pytest", "unittest", "mock", "numpy", "pandas"}
"""Names that ``from solution import *`` gives of the program only where its text imports them."""
OF_PYTEST = ("setup", "teardown", "pytest")
"""Beginnings of names that pytest calls in a module of tests."""


class RemoteProgram:
    """A program in another process.

    Args:
        link: to it.
        imports: what its text imports at its top: module and name by the name that it has there.
        supplied: names of the prelude that tests may use.
        loaded: names that the tests use, see :func:`names_used`.
        classes: those of them that are used as classes.
    """

    counts_tests = True

    def __init__(self, link, imports, supplied, loaded, classes):
        self.link, self.imports, self.supplied = link, imports, supplied
        self.loaded, self.classes = loaded, classes
        self.names, self.hidden = set(), set()
        self.functions = set()
        self.module = ProgramModule(self)
        input_here = builtins.input
        link.served = {
            "input": lambda _, prompt: (builtins.input if builtins.input is not input_here else read_line)(prompt),
            "read": lambda _: sys.stdin.readline(),
        }

    @property
    def used(self):
        """How often anything was asked of it."""
        return self.link.num_asked

    @property
    def has_ended(self):
        """Whether its process has ended, or does not answer as it should."""
        return self.link.has_ended

    def wait_until_loaded(self):
        """Waits for the program; "" once it is loaded, else why it is not."""
        while "op" in (message := self.link.receive()):
            self.link.serve(message)
        if "unloaded" in message:
            return str(message["unloaded"]) or "it does not load"
        self.names = {str(name) for name in message["loaded"]}
        return ""

    def named(self, name):
        """Its value of a name; a class that the tests use as one is marked as named.

        What they use as a function is none, be it a class, and be it known to them by another name as well.
        """
        value = self.link.ask("global", name=name)
        if isinstance(value, Mirror) and name in self.loaded:
            if name not in self.classes:
                self.functions.add(value._key)
                self.link.named.discard(value._key)
            elif value._key not in self.functions:
                self.link.named.add(value._key)
        return value

    def imported(self, name):
        """What it imports under a name, which is looked up here."""
        module, attribute = self.imports[name]
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    def is_theirs(self, error):
        """Whether the tests raised an exception themselves."""
        return id(error) not in self.link.raised_there

    def hides(self, names, own):
        """Says which names ``from solution import *`` does not give to these tests."""
        packages = PACKAGES - set(self.imports)
        called = {name for name in self.names if name.startswith(OF_PYTEST)}
        self.hidden = {*vars(builtins), *self.supplied, *names, *packages, *called} - set(own)


class ProgramModule(types.ModuleType):
    """The program, as its tests import it."""

    def __init__(self, program):
        super().__init__("solution")
        vars(self)["_program"] = program

    def __getattr__(self, name):
        program = vars(self)["_program"]
        if name == "__all__":
            return [one for one in program.names if not one.startswith("_") and one not in program.hidden]
        if name in program.imports:
            return program.imported(name)
        if name.startswith("__") or name not in program.names:
            raise AttributeError(f"the program has no {name}")
        return program.named(name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            vars(self)["_program"].link.ask("set_global", name=name, args=(value,))

    def __delattr__(self, name):
        vars(self)["_program"].link.ask("delete_global", name=name)


def names_used(cases):
    """Names that tests use outside of their imports, and those of them that may be a program's classes.

    A class has a name that begins with a capital letter, is not ``Solution``, means nothing of Python's, and is not
    only called and compared with values, as functions are.
    """
    loaded, classes, own = set(), set(), set()
    for case in cases:
        own.update(case["own"])
        try:
            tree = ast.parse(case["code"])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        used = Uses(tree)
        loaded |= used.loaded
        classes |= used.as_classes
    return loaded, {name for name in classes - own - {"Solution"} if name[:1].isupper() and "_" not in name}


class Uses:
    """Where a tree uses names that may be a program's.

    Args:
        tree: of a text of tests.
    """

    def __init__(self, tree):
        self.loaded, self.as_classes = set(), set()
        self.above = {below: node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
        self.others, self.originals = set(PACKAGES), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.others |= {one.asname or one.name.partition(".")[0] for one in node.names if is_other(one.name)}
            elif isinstance(node, ast.ImportFrom):
                if node.module and not node.level and is_other(node.module):
                    self.others |= {one.asname or one.name for one in node.names}
                else:
                    self.originals |= {one.asname: one.name for one in node.names if one.asname}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.others.add(node.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self.others:
                self.add(self.originals.get(node.id, node.id), node)
            elif isinstance(node, ast.Attribute) and self.root(node) not in self.others:
                self.add(node.attr, node)

    def root(self, node):
        """The name before the dots of an attribute."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def add(self, name, node):
        """Notes a use of a name."""
        self.loaded.add(name)
        if not self.is_of_function(node):
            self.as_classes.add(name)

    def is_of_function(self, node):
        """Whether a use is a call whose result, or a function of it, is compared at once with no object."""
        above = self.above.get(node)
        if not isinstance(above, ast.Call) or above.func is not node:
            return False
        while isinstance(above, ast.Call) and isinstance(outer := self.above.get(above), ast.Call | ast.UnaryOp):
            above = outer
        return isinstance(self.above.get(above), ast.Compare | ast.Assert)


def is_other(module):
    """Whether a dotted name is that of a module which is not the program."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names:
        return True
    try:
        return first not in MODULES and importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False


def examine(cases, reading, writing, *, imports, supplied, report, session):
    """Runs the tests of all cases on the program at the other end.

    Args:
        cases: see :class:`.test_runner.Tests`.
        reading: descriptor.
        writing: descriptor.
        imports: see :class:`RemoteProgram`.
        supplied: likewise.
        report: see :class:`.test_runner.Tests`.
        session: likewise.
    """
    link = Link(reading, writing, is_guarded=True)
    program = RemoteProgram(link, imports, supplied, *names_used(cases))
    try:
        said = program.wait_until_loaded()
    except EndedError:
        said = "the program ended while it was loaded"
    if said:
        report({"unloaded": said})
        return
    Tests(program, supplied, vars(builtins), report, session).run(cases)
