"""A program's code with guards: what its text does not show is checked when it runs, which is whose attributes it uses.

Attributes that are set, private ones (``_x``) that are read, and those whose names are made when it runs must be those
of the program's own objects or of the tests'. The static check cannot tell which object a name stands for; so each such
object is handed through a function, which ends the process for an object of anybody else's, and the program is given a
process of its own. Runs inside the sandbox; needs the standard library only.
"""

import ast
import os
import types

from gtpo_megatron.sandbox.inside.special_methods import is_dunder
from gtpo_megatron.sandbox.inside.static_check.allowlist import BY_NAME, CHECKS, DUNDERS_READ, INSIDES, VALUES

NAME = "solution"
OWN_FILES = ("program.py", "stub.py", "tests.py")
OWN_MODULES = (NAME, "program", "__main__")
OPEN_MODULES = ("threading", "logging", "argparse", "numpy", "sqlite3", "configparser", "types")
"""Modules of objects whose public attributes anybody sets."""


class GuardedCode(ast.NodeTransformer):
    """Hands objects through functions.

    Args:
        names: names for the functions of :class:`Guards`, by their names there.
    """

    def __init__(self, names):
        self.names = names

    def visit_Attribute(self, node):
        """``x._y``, ``x.y = z`` and ``x.__dict__``."""
        self.generic_visit(node)
        if node.attr == "__dict__" and isinstance(node.ctx, ast.Load):
            return self._called("names_of", [node.value], node)
        if is_private(node.attr):
            node.value = self._called("own", [node.value], node.value)
        elif not isinstance(node.ctx, ast.Load):
            node.value = self._called("open", [node.value], node.value)
        return node

    def visit_Call(self, node):
        """``getattr(x, y)`` and its kin, ``vars(x)``, and ``object.__setattr__(x, "y", z)``."""
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        if name in BY_NAME:
            return self._called(name, node.args, node, node.keywords)
        if name == "vars" and len(node.args) == 1:
            return self._called("names_of", node.args, node)
        if getattr(node.func, "attr", "") in ("__setattr__", "__delattr__") and len(node.args) > 1:
            node.args[0] = self._called("own", [node.args[0]], node.args[0])
        return node

    def _called(self, name, args, place, keywords=()):
        call = ast.Call(ast.Name(self.names[name], ast.Load()), args, list(keywords))
        for one in (call, call.func):
            ast.copy_location(one, place)
        return call


class Guards:
    """What objects are handed through; a program that reaches what is not its own is ended.

    Args:
        report: says that the program needs a process of its own.
    """

    def __init__(self, report):
        self.report = report

    def end(self, what):
        """Ends the process."""
        self.report({"not_allowed": f"it reaches into {what}"})
        os._exit(0)

    def own(self, value):
        """An object of the program or of its tests."""
        if not is_own(value):
            self.end(described(value))
        return value

    def open(self, value):
        """An object whose public attributes may be set."""
        module = type(value).__module__.partition(".")[0]
        if not (is_own(value) or module in OPEN_MODULES or isinstance(value, BaseException)):
            self.end(described(value))
        return value

    def names_of(self, value):
        """The names of an object of one of the program's own classes."""
        if type(value).__module__ != NAME or isinstance(value, (*VALUES, type)):
            self.end(f"the names of {described(value)}")
        return value.__dict__

    def named(self, value, name, *, is_set):
        """An object and the name of one of its attributes, which may be read, or set."""
        if type(name) is not str:
            self.end("an attribute by what is no text")
        is_hidden = (is_dunder(name) and (is_set or name not in DUNDERS_READ)) or name in INSIDES or name == "format"
        is_check = is_set and (name in CHECKS or isinstance(value, (*VALUES, type)))
        if is_hidden or is_check:
            self.end(f"{name} of {described(value)}")
        if is_private(name):
            self.own(value)
        elif is_set:
            self.open(value)
        return value, name

    def getattr(self, value, name, *default):
        """As Python's."""
        return getattr(*self.named(value, name, is_set=False), *default)

    def hasattr(self, value, name):
        """As Python's."""
        return hasattr(*self.named(value, name, is_set=False))

    def setattr(self, value, name, given):
        """As Python's."""
        setattr(*self.named(value, name, is_set=True), given)

    def delattr(self, value, name):
        """As Python's."""
        delattr(*self.named(value, name, is_set=True))


GUARDS = ("own", "open", "names_of", *BY_NAME)


def described(value):
    """The class of an object, or a class, in words."""
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_private(name):
    """Whether an attribute is its class's own affair."""
    return name.startswith("_") and not is_dunder(name)


def codes_of(texts, report):
    """The codes of a program's texts, and the functions by the names under which they must be found.

    Args:
        texts: texts of the program, by the names of their files.
        report: says that the program needs a process of its own.
    """
    guards = Guards(report)
    names = {name: f"_{os.urandom(16).hex()}" for name in GUARDS}  # which no program knows
    codes = []
    for file, text in texts.items():
        tree = GuardedCode(names).visit(ast.parse(text))
        codes.append(compile(tree, file, "exec", dont_inherit=True))
    return codes, {names[name]: getattr(guards, name) for name in GUARDS}


def is_own(value):
    """Whether an object is of a class of the program or of its tests, or is such a class or a function of theirs."""
    kind = type(value)
    if kind is super:
        return value.__thisclass__.__module__ in OWN_MODULES
    if kind is types.FunctionType:
        return value.__code__.co_filename in OWN_FILES
    if isinstance(value, type) and value.__module__ in OWN_MODULES:
        return True
    return kind.__module__ in OWN_MODULES
