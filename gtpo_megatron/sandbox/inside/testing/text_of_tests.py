"""The text of tests, changed in two places before it is executed: imports of the program, and managers of a program.

A ``with`` of the tests may be of an object of the program, which can suppress what is raised in it. It may do so for
what the tests raise themselves, and must not for a check that fails: see :class:`CheckedManager`. Runs inside the
sandbox; needs the standard library only.
"""

import ast
import contextlib

from gtpo_megatron.sandbox.inside.static_check.scopes import bindings
from gtpo_megatron.sandbox.inside.tracebacks import TESTS, places

CHECK = "_gtpo_checked_manager"


class CheckedManager:
    """A context manager whose suppressing is looked at: no failed check, and nothing that a statement stands behind.

    What is raised by a ``raise`` of the tests, under no condition, may be suppressed whatever it is.

    Args:
        manager: context manager of the ``with``.
        raising: lines of its body that raise under no condition.
        last: the last line of its body behind which nothing is called or checked.
    """

    def __init__(self, manager, raising, last):
        self.manager, self.raising, self.last = manager, raising, last

    def __enter__(self):
        return type(self.manager).__enter__(self.manager)

    def __exit__(self, kind, error, trace):
        return self.holds(type(self.manager).__exit__(self.manager, kind, error, trace), error, trace)

    async def __aenter__(self):
        return await type(self.manager).__aenter__(self.manager)

    async def __aexit__(self, kind, error, trace):
        return self.holds(await type(self.manager).__aexit__(self.manager, kind, error, trace), error, trace)

    def holds(self, suppressed, error, trace):
        """What the manager says, unless it suppresses what it may not."""
        if not suppressed or error is None:
            return suppressed
        found = places(trace)
        lines = [line for file, line in found if file == TESTS]
        if found and found[-1][0] == TESTS and found[-1][1] in self.raising:
            return suppressed
        is_check = isinstance(error, AssertionError) or type(error).__module__ == "_pytest.outcomes"
        return suppressed if not is_check and lines and lines[0] >= self.last else False


def checked_manager(manager, raising, last):
    """A manager of the tests', of unittest or of pytest as it is; any other within a :class:`CheckedManager`."""
    kind = type(manager)
    if kind.__module__.partition(".")[0] in ("_pytest", "pytest", "unittest", "warnings", "__main__"):
        return manager
    is_generator = kind in (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)
    if is_generator and manager.gen is not None and _code_of(manager.gen).co_filename == TESTS:
        return manager
    if not hasattr(kind, "__exit__") and not hasattr(kind, "__aexit__"):
        return manager
    return CheckedManager(manager, frozenset(raising), last)


def _code_of(generator):
    return getattr(generator, "gi_code", None) or generator.ag_code


class TextChanges(ast.NodeTransformer):
    """Changes the tree of a text of tests.

    Args:
        tree: tree of the text.
    """

    def __init__(self, tree):
        names = set(contextlib.__all__) - {"ExitStack", "AsyncExitStack"}  # which ask the managers that they are given
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "contextlib"]
        self.pythons = {one.asname or one.name for node in imported for one in node.names if one.name in names}
        self.pythons |= {f"contextlib.{name}" for name in names}

    def visit_Import(self, node):
        """``import src.solution as s``: the program stands for each of the two, and is no part of itself."""
        dotted = [alias for alias in node.names if alias.asname and "." in alias.name]
        if not dotted:
            return node
        others = [alias for alias in node.names if alias not in dotted]
        text = "".join(f"{one.asname} = __import__('importlib').import_module({one.name!r})\n" for one in dotted)
        made = [*([ast.Import(others)] if others else []), *ast.parse(text).body]
        for one in made:
            for part in ast.walk(one):
                ast.copy_location(part, node)
        return made

    def visit_ImportFrom(self, node):
        """``from .solution import f`` and ``from . import solution``: there is no package."""
        if not node.level:
            return node
        if node.module:
            return ast.copy_location(ast.ImportFrom(node.module, node.names, 0), node)
        return ast.copy_location(ast.Import(node.names), node)

    def visit_With(self, node):
        """Puts each manager into a call that looks at it."""
        self.generic_visit(node)
        lines, last = raising_lines(node.body), last_line_of(node.body)
        for item in node.items:
            called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
            if called is not None and ast.unparse(called) in self.pythons:
                continue
            given = [ast.Tuple([ast.Constant(one) for one in lines], ast.Load()), ast.Constant(last)]
            call = ast.Call(ast.Name(CHECK, ast.Load()), [item.context_expr, *given], [])
            item.context_expr = ast.copy_location(call, item.context_expr)
        return ast.fix_missing_locations(node)

    visit_AsyncWith = visit_With  # noqa: N815


SAYING = ("print", "append", "add", "fail", "warn", "sleep")
"""Calls that check nothing."""


def last_line_of(body):
    """The first line of a body behind which nothing is called or checked that could find a fault."""
    last = 0
    for statement in body:
        for node in ast.walk(statement):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            is_false = isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant)
            if (isinstance(node, ast.Assert) and not is_false) or (name and name not in SAYING):
                last = max(last, node.lineno)
            if isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
                raised = [one.lineno for one in ast.walk(node) if isinstance(one, ast.Raise)]
                last = max([last, *(line + 1 for line in raised)])  # which is a check
    return last


def raising_lines(body):
    """Lines of the statements that raise without a condition."""
    found = []
    for statement in body:
        if isinstance(statement, ast.Raise):
            found += range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.For | ast.While | ast.Try):
            found += raising_lines(statement.body)
    return found


def changed(tree):
    """The code of the tree of a text of tests, which is changed."""
    return compile(TextChanges(tree).visit(tree), TESTS, "exec", dont_inherit=True)


def imported_modules(tree):
    """Dotted names of the modules that a tree imports, in order; with the names of those that it can go on without.

    A module that it needs has None.
    """
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any(_catches_missing(one) for one in node.handlers)
        for part in node.body
        for inner in ast.walk(part)
    }
    found = {}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            if node not in optional or found.get(name, ()) is None:
                found[name] = None
            else:
                found[name] = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    return found


def _catches_missing(handler):
    """Whether a handler is for a module that is not there."""
    return handler.type is None or any(
        getattr(one, "id", "") in ("ImportError", "ModuleNotFoundError", "Exception") for one in ast.walk(handler.type)
    )


def own_names(tree):
    """Names that the module of a tree binds, wherever in it, but not in functions and classes."""
    found, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        found.update(bindings(node))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found
