"""Tests that are written in Python: assertions, ``check(candidate)``, pytest's functions and classes, unittest's cases.

A text is read, not run, when a set is read: what would run no test, or test nothing, is refused then. Which tests there
are pytest decides, when they are run.
"""

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.static_check.scopes import bindings
from gtpo_megatron.sandbox.inside.testing.names import PROGRAM_MODULES
from gtpo_megatron.sandbox.packages import DEFAULT, FRAMEWORK
from gtpo_megatron.sandbox.protocol import Case
from gtpo_megatron.untrusted.text import printable

_SUPPLIED = frozenset(prelude.for_tests(prelude.names()))
_KNOWN = frozenset(vars(builtins)) | _SUPPLIED
"""Names that mean Python's or the prelude's in tests, whatever a program calls so."""

_RUNNERS = ("unittest.main", "pytest.main", "main", "sys.exit")
"""Calls that run the tests of a text, which are run one by one here."""

_DOING = (ast.Assert, ast.Raise, ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith)


def cases_of_text(code: str, where: str, *, entry_point: str = "") -> list[Case]:
    """The text as a case: its tests are what pytest finds in it, else the text is one.

    Args:
        code: Python.
        where: place of the text, for errors.
        entry_point: argument for a ``check`` that is not called; "": not known.

    Raises:
        DataError: it is no Python, would run no test, or would test nothing.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise DataError(
            f"{where}: its tests are no Python{f' (line {line})' if line else ''}: {printable(error)}"
        ) from error
    tests = list(_tests_in(tree.body))
    is_found = bool(tests) or _makes_tests(tree)
    if not is_found and not _does_something(tree):
        check = next((one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "check"), None)
        if check is None:
            raise DataError(
                f"{where} would run no test: it has {_content(tree)}; expected assertions, a call, functions test_..., "
                f"or a unittest.TestCase"
            )
        if not entry_point:
            raise DataError(
                f"{where} defines check(...) and never calls it; call it, or name the function in entry_point"
            )
        code = f"{code}\ncheck({entry_point})"
        tree = ast.parse(code)
    if reason := _vain(tree, tests):
        raise DataError(f"{where} would test nothing: {reason}; no program could earn it, or every one would")
    return [Case(code=code, num_tests=max(len(tests), is_found), own=_own_names(tree, entry_point))]


def _content(tree: ast.Module) -> str:
    names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return f"the definitions of {printable(', '.join(names[:5]))}" if names else "no definition and no call"


def _does_something(tree: ast.Module) -> bool:
    """Whether the text, run as it is, asserts or calls anything outside its definitions."""
    return any(_is_doing(one) for one in tree.body)


def _is_doing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If | ast.Try):
        return any(_is_doing(one) for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)) or any(
            _is_doing(one) for handler in getattr(statement, "handlers", []) for one in handler.body
        )
    if isinstance(statement, _DOING):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    return ast.unparse(statement.value.func) not in (*_RUNNERS, "print")


def _vain(tree: ast.Module, tests: Sequence[tuple[ast.stmt, Any]]) -> str:
    """Why tests that are run test no program; "" if they may."""
    walked = list(ast.walk(tree))
    decorators = {id(part) for one in walked for part in ast.walk(one) if part in getattr(one, "decorator_list", [])}
    calls = [one for one in walked if isinstance(one, ast.Call) and id(one) not in decorators]
    defined = {one.name for one in walked if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    checks = any(isinstance(one, ast.Assert | ast.Raise) for one in walked)
    if not checks and not any(_is_called_for_result(one, defined) for one in calls):
        return "it has no assertion and no call of a program"
    texts = {one.value.partition(".")[0] for one in walked if isinstance(one, ast.Constant) and type(one.value) is str}
    modules = {alias.name for one in walked if isinstance(one, ast.Import) for alias in one.names}
    free = _free_names(tree) - {"print", "__name__"}
    if not (free or _of_program(tree) or set(PROGRAM_MODULES) & texts or any(map(_is_program, modules))):
        return "it names nothing that a program could define"
    is_skipped = bool(tests) and all(_is_skipped(one, owners) for one, owners in tests)
    return "all of its tests are skipped" if is_skipped else ""


def _is_called_for_result(call: ast.Call, defined: set[str]) -> bool:
    name = ast.unparse(call.func)
    return name not in (*_RUNNERS, "print", "super") and name not in defined and not name.startswith("super()")


def _is_skipped(function: ast.AST, owners: Sequence[ast.ClassDef]) -> bool:
    """Whether a test, or a class of it, has a mark that skips it always."""
    return any(
        ast.unparse(mark).partition("(")[0] in ("pytest.mark.skip", "unittest.skip", "mark.skip", "skip")
        for one in (function, *owners)
        for mark in getattr(one, "decorator_list", [])
    )


def _tests_in(body: Sequence[ast.stmt], owners: tuple[ast.ClassDef, ...] = ()) -> Iterator[tuple[ast.stmt, Any]]:
    """What pytest may find a test in, with the classes that it is in: definitions, and names that are assigned.

    pytest decides which are tests, when they are run; here is asked whether there may be any.
    """
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test"):
            yield one, owners
        elif isinstance(one, ast.ClassDef):
            if not _hides_tests(one) and (one.name.startswith("Test") or one.bases or one.name in _bases_in(body)):
                yield from _tests_in(one.body, (*owners, one))
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            if any(name.startswith(("test", "Test")) and name.strip("est") for name in names):
                yield one, owners
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(one, part, [])
                yield from _tests_in([line for each in inner for line in getattr(each, "body", [each])]
                                     if part == "handlers" else inner, owners)  # fmt: skip


def _bases_in(body: Sequence[ast.stmt]) -> set[str]:
    """Names of the classes of which others are made."""
    return {ast.unparse(base) for one in body if isinstance(one, ast.ClassDef) for base in one.bases}


def _makes_tests(tree: ast.Module) -> bool:
    """Whether tests may be made when the text runs: by ``setattr``, ``globals()`` or ``type``."""
    calls = {ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    return bool(calls & {"setattr", "globals", "type", "load_tests"}) and any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith("test")
        for one in ast.walk(tree)
    )


def _hides_tests(kind: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.Assign) and ast.unparse(one) == "__test__ = False" for one in kind.body)


def _own_names(tree: ast.Module, entry_point: str) -> tuple[str, ...]:
    """Names of Python's or the prelude's that mean the program's in these tests.

    The entry point, what is imported from the program, and all of them if the tests name nothing else that a program
    must define: ``assert sum(1, 2) == 3``.
    """
    free = _free_names(tree)
    imported = {alias.name for alias in _of_program(tree)}
    asked = {entry_point.partition(".")[0], *imported} & _KNOWN
    is_clear = bool(imported) or bool(free - _KNOWN) or entry_point in free
    return tuple(sorted(asked | (set() if is_clear else free & _KNOWN - {"print", "__name__"})))


def _of_program(tree: ast.Module) -> list[ast.alias]:
    """Names that the text imports from the program."""
    found = (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom))
    return [alias for one in found if one.level or _is_program(one.module or "") for alias in one.names]


def _is_program(module: str) -> bool:
    """Whether a module is none of Python's or of the sandbox's, so that it is the program under its own name."""
    first = module.partition(".")[0]
    return first in PROGRAM_MODULES or not (first in sys.stdlib_module_names or first in (*DEFAULT, *FRAMEWORK))


def _free_names(tree: ast.Module) -> set[str]:
    """Names that the text uses and does not bind."""
    loaded = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return loaded - {name for one in ast.walk(tree) for name in bindings(one)}
