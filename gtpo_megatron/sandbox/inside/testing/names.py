"""Names in the tests of a program: which mean the program's, and which Python's or another module's.

No name of the tests is the program's before they ask for it. Runs inside the sandbox; needs the standard library only.
"""

import importlib
import importlib.util
import sys
import types

from gtpo_megatron.sandbox.inside import prelude

PROGRAM_MODULES = ("solution", "submission", "program", "candidate", "main", "your_module")
"""Modules as which tests may import the program, besides any name under which no other module is found."""

COMPARED_CLASSES = frozenset(
    (
        *("ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"),
        *("date", "datetime", "timedelta", "Decimal", "Fraction"),
    )
)
"""Names of a prelude that no program takes the place of: of classes whose objects tests compare."""

ALIASES = {"np": "numpy", "pd": "pandas"}
"""Names that tests use for packages, although their program may be the one that imports them."""

MODULE_NAMES = sys.stdlib_module_names | {*ALIASES, *ALIASES.values(), "pytest", "mock"}
HOOKS = ("_", "pytest", "setup", "setUp", "teardown", "tearDown")
"""Beginnings of names that mean something to pytest or unittest in a module of tests, or are private."""


def is_other(module):
    """Whether a dotted name is that of a module which is there, and not the program."""
    first = module.partition(".")[0]
    if first in PROGRAM_MODULES:
        return False
    if first in sys.stdlib_module_names or first in sys.modules:
        return True
    try:
        return importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False


class TestedProgram:
    """What tests see of a program, wherever it runs.

    Args:
        imports: imports at the top of its text: module and name, by the name that they have there.
        supplied: names of the prelude that tests may use.
        pythons: Python's own names, without what a prelude puts there for a program.

    Attributes:
        names: names that its module binds.
        module: the module that tests import.
        used: number of times that the tests have used it.
        has_ended: whether its process has ended, or does not answer as it should.
        counts_tests: each test of pytest's must use it, not only one of a text.
    """

    counts_tests = False
    has_ended = False
    used = 0

    def __init__(self, imports, supplied, pythons):
        self.imports, self.supplied, self.pythons = imports, supplied, pythons
        self.compared = COMPARED_CLASSES & supplied.keys()
        self.names, self.hidden, self.own = set(), set(), set()

    def named(self, name):
        """Its value of a name."""
        raise NotImplementedError

    def imported(self, name):
        """What its text imports under a name, which is looked up here: it may have put something there."""
        module, attribute = self.imports[name]
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    def is_theirs(self, _error):
        """Whether the tests raised an exception themselves."""
        return True

    def hides(self, names, own):
        """Says which names ``from solution import *`` does not give to a text of tests.

        Those of the prelude are among them: tests get them, or what the program has in their place, as they use them.

        Args:
            names: names that the text binds itself.
            own: names of Python or the prelude that mean the program's in it.
        """
        self.hidden, self.own = {*self.pythons, *self.supplied, *names}, set(own)

    def given(self, names):
        """Those of some names that ``*`` gives: none of a module, and none that means something to pytest."""
        return [
            name
            for name in names
            if name in self.own
            or (
                name not in self.hidden
                and (name in self.imports or not (name.startswith(HOOKS) or name in MODULE_NAMES))
            )
        ]


class NamesOfTests(dict):
    """The names of a text of tests: its own, then the program's, then the prelude's, then Python's.

    Args:
        program: a :class:`TestedProgram`.
        own: names of the prelude or of Python that are the program's.
    """

    def __init__(self, program, own):
        super().__init__(__name__="__main__", __builtins__=program.pythons, __doc__=None, __file__="/tests.py")
        self.program, self.own = program, own

    def __missing__(self, name):
        program, is_pythons = self.program, name in self.program.pythons
        if name in self.own:
            if name in program.names:
                return program.named(name)
        elif name in program.imports and not is_pythons:  # the tests were written for a file with these imports
            return program.imported(name)
        elif name in ALIASES and importlib.util.find_spec(ALIASES[name]) is not None:
            return importlib.import_module(ALIASES[name])
        elif name in prelude.NODES or (name in program.names and not is_pythons and name not in program.compared):
            return program.named(name)
        elif name in program.supplied:
            return program.supplied[name]
        raise KeyError(name)


class ModuleOfTests(types.ModuleType):
    """The module of a text of tests, whose names are a :class:`NamesOfTests`."""

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
