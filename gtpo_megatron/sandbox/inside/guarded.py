"""A plain program's code, in which what its text does not show is looked at when it runs: whose attributes it reaches.

Attributes that are set, and private ones (``_x``) that are read, must be those of the program's own objects or of the
tests'. The reader (:mod:`.plain`) cannot tell which object a name stands for; so each such object is handed through a
function, which ends the process for an object of anybody else's, and the program is run apart. Runs inside the sandbox;
needs the standard library only.
"""

import ast
import os
import types

from gtpo_megatron.sandbox.inside.plain_tables import is_dunder

OWN_FILES = ("program.py", "stub.py", "tests.py")
OWN_MODULES = ("solution", "program", "__main__")
OPEN_MODULES = ("threading", "logging", "argparse", "numpy", "sqlite3", "configparser", "types")
"""Modules of objects whose public attributes anybody sets."""

BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


class Guarded(ast.NodeTransformer):
    """Hands objects through a function.

    Args:
        reads: name of the function for private attributes.
        sets: name of the function for attributes that are set.
    """

    def __init__(self, reads, sets):
        self.reads, self.sets = reads, sets

    def visit_Attribute(self, node):
        """``x._y`` and ``x.y = z``."""
        self.generic_visit(node)
        is_set = not isinstance(node.ctx, ast.Load)
        if is_private(node.attr) or is_set:
            node.value = self._through(node.value, is_set=is_set and not is_private(node.attr))
        return node

    def visit_Call(self, node):
        """``getattr(x, "_y")``, ``setattr(x, "y", z)`` and ``object.__setattr__(x, "y", z)``."""
        self.generic_visit(node)
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        is_by_name = name in BY_NAME or (name in ("__setattr__", "__delattr__") and len(node.args) > 1)
        if is_by_name and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            is_hidden = is_private(str(node.args[1].value))
            if is_hidden or name not in ("getattr", "hasattr"):
                node.args[0] = self._through(node.args[0], is_set=not is_hidden)
        return node

    def _through(self, value, *, is_set):
        call = ast.Call(ast.Name(self.sets if is_set else self.reads, ast.Load()), [value], [])
        for one in (call, call.func):
            ast.copy_location(one, value)
        return call


def is_private(name):
    """Whether an attribute is its class's own affair."""
    return name.startswith("_") and not is_dunder(name)


def codes_of(texts, report, names):
    """The codes of a program's texts, and the functions by the names under which they must be found.

    Args:
        texts: of the program, by the names of their files.
        report: says that the program must run apart.
        names: two names that the program cannot know.
    """

    def end(value):
        kind = value if isinstance(value, type) else type(value)
        report({"apart": f"it reaches into {kind.__module__}.{kind.__qualname__}"})
        os._exit(0)

    def read_of(value):
        if not is_own(value):
            end(value)
        return value

    def set_of(value):
        module = type(value).__module__.partition(".")[0]
        if not (is_own(value) or module in OPEN_MODULES or isinstance(value, BaseException)):
            end(value)
        return value

    codes = []
    for file, text in texts.items():
        tree = Guarded(*names).visit(ast.parse(text))
        codes.append(compile(tree, file, "exec", dont_inherit=True))
    return codes, dict(zip(names, (read_of, set_of), strict=True))


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
