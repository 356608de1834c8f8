"""The text of tests, changed in two places before it is executed: imports of the program, and managers of a program.

A ``with`` of the tests may be of an object of the program, which can suppress what is raised in it. It may do so for
what the tests raise themselves, and must not for a check that fails: see :class:`Manager`. Runs inside the sandbox;
needs the standard library only.
"""

import ast
import contextlib

CHECK = "_gtpo_checked_manager"


class Manager:
    """A context manager whose suppressing is looked at.

    Args:
        manager: of the ``with``.
        raising: lines of the body that raise, whatever happens before; None if the body checks nothing.
    """

    def __init__(self, manager, raising):
        self.manager, self.raising = manager, raising

    def __enter__(self):
        return type(self.manager).__enter__(self.manager)

    def __exit__(self, kind, error, trace):
        suppressed = type(self.manager).__exit__(self.manager, kind, error, trace)
        return self.holds(suppressed, error, trace)

    async def __aenter__(self):
        return await type(self.manager).__aenter__(self.manager)

    async def __aexit__(self, kind, error, trace):
        suppressed = await type(self.manager).__aexit__(self.manager, kind, error, trace)
        return self.holds(suppressed, error, trace)

    def holds(self, suppressed, error, trace):
        """What the manager says, unless it suppresses a check."""
        if not suppressed or error is None or self.raising is None:
            return suppressed
        line = 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "tests.py" and trace.tb_next is None else 0
            trace = trace.tb_next
        return suppressed if line in self.raising else False


def checked_manager(manager, raising):
    """A manager of the tests', of unittest or of pytest as it is; any other within a :class:`Manager`."""
    kind = type(manager)
    code = getattr(getattr(manager, "gen", None), "gi_code", None)
    if kind.__module__.partition(".")[0] in ("_pytest", "pytest", "unittest", "warnings", "__main__"):
        return manager
    if code is not None and code.co_filename == "tests.py":
        return manager
    if not hasattr(kind, "__exit__") and not hasattr(kind, "__aexit__"):
        return manager
    return Manager(manager, None if raising is None else frozenset(raising))


class Changed(ast.NodeTransformer):
    """Changes the tree of a text of tests.

    Args:
        tree: of the text.
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
        lines = raising_lines(node.body) if checks_in(node.body) else None
        for item in node.items:
            called = item.context_expr.func if isinstance(item.context_expr, ast.Call) else None
            if called is not None and ast.unparse(called) in self.pythons:
                continue
            given = ast.Constant(None) if lines is None else ast.Tuple([ast.Constant(one) for one in lines], ast.Load())
            call = ast.Call(ast.Name(CHECK, ast.Load()), [item.context_expr, given], [])
            item.context_expr = ast.copy_location(call, item.context_expr)
        return ast.fix_missing_locations(node)

    visit_AsyncWith = visit_With  # noqa: N815


def checks_in(body):
    """Whether statements check anything: an assertion, a method of unittest, or a raise under a condition."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert):
                return True
            if isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in ast.walk(node)):
                return True
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name.startswith(("assert", "fail")):
                return True
    return False


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
    return compile(Changed(tree).visit(tree), "tests.py", "exec", dont_inherit=True)


def imported_modules(tree):
    """Dotted names of the modules that a tree imports, in order, but for those that may be missing."""
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any(_catches_missing(one) for one in node.handlers)
        for part in node.body
        for inner in ast.walk(part)
    }
    found = []
    for node in ast.walk(tree):
        if node in optional:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module else [alias.name for alias in node.names]
    return list(dict.fromkeys(found))


def _catches_missing(handler):
    """Whether a handler is for a module that is not there."""
    return handler.type is None or any(
        getattr(one, "id", "") in ("ImportError", "ModuleNotFoundError", "Exception") for one in ast.walk(handler.type)
    )


def own_names(tree):
    """Names that the module of a tree binds by imports and definitions."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
    return set(found)


def imports_at_top(trees):
    """What the texts of a program import at their top: module and name ("" for the module) by its name there.

    Only what can be told from the text alone: a name of a module that is called something else is left out.
    """
    found = {}
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = (alias.name if alias.asname else first, "")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.name: (node.module, alias.name) for alias in node.names if not alias.asname}
    return found
