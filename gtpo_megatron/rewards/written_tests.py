"""Tests that are written in Python: assertions, ``check(candidate)``, pytest's functions and classes, unittest's cases.

A text is read, not run, when a set is read: what would run no test, and what the sandbox could not do, is refused then.
"""

import ast
import builtins
from collections.abc import Iterator

from gtpo_megatron.errors import DataError
from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.exam import MODULES
from gtpo_megatron.sandbox.inside.pytest_shapes import FIXTURES, OFFERED
from gtpo_megatron.sandbox.protocol import Case
from gtpo_megatron.untrusted.text import printable

_SUPPLIED = frozenset(prelude.for_tests(prelude.names()))
_KNOWN = frozenset(vars(builtins)) | _SUPPLIED
"""Names that mean Python's or the prelude's in tests, whatever a program calls so."""

_UNKNOWN_FIXTURES = (
    "caplog",
    "capfd",
    "capsysbinary",
    "mocker",
    "recwarn",
    "tmpdir",
    "tmp_path_factory",
    "pytestconfig",
)
_STREAMS = ("sys.stdin", "sys.stdout", "sys.stderr", "builtins.input")
"""What tests may replace outside the program: it reads and prints by the tests' streams."""

_RUNNERS = ("unittest.main", "pytest.main", "main", "sys.exit")
"""Calls that run the tests of a text, which are run one by one here."""

_DOING = (ast.Assert, ast.Raise, ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith)


def cases_of_text(code: str, where: str, *, entry_point: str = "") -> list[Case]:
    """The tests in a text, each a case of its own: functions and methods one by one, else the text.

    Args:
        code: Python.
        where: it is, for errors.
        entry_point: what an uncalled ``check`` is called with; "": not known.

    Raises:
        DataError: it is no Python, would run no test, or uses what the sandbox does not have.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise DataError(
            f"{where}: its tests are no Python{f' (line {line})' if line else ''}: {printable(error)}"
        ) from error
    _check_usable(tree, where)
    named = list(_named_tests(tree))
    if not named and not _does_something(tree):
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
    if reason := _vain(tree, named):
        raise DataError(f"{where} would test nothing: {reason}; no program could earn it, or every one would")
    own = _own_names(tree, entry_point)
    return [Case(code=code, test=test, own=own) for test in named or [""]]


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


def _vain(tree: ast.Module, named: list[str]) -> str:
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
    loaded = {one.id for one in walked if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    free = loaded - _bound_names(tree) - {"print", "__name__"}
    if not (free or _of_program(tree) or set(MODULES) & (texts | modules)):
        return "it names nothing that a program could define"
    skipped = {name for name in named if _is_skipped(tree, name)}
    return "all of its tests are skipped" if named and skipped == set(named) else ""


def _is_called_for_result(call: ast.Call, defined: set[str]) -> bool:
    name = ast.unparse(call.func)
    return name not in (*_RUNNERS, "print", "super") and name not in defined and not name.startswith("super()")


def _is_skipped(tree: ast.Module, test: str) -> bool:
    """Whether a test, or its class, has a mark that skips it always."""
    owner, _, name = test.rpartition(".")
    marked = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and one.name in (owner, name)
    ]
    return any(
        ast.unparse(mark).partition("(")[0] in ("pytest.mark.skip", "unittest.skip", "mark.skip", "skip")
        for one in marked
        for mark in one.decorator_list
    )


def _named_tests(tree: ast.Module) -> Iterator[str]:
    """Functions ``test...``, and methods ``CLASS.test...`` of test classes, inherited ones too."""
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    for one in tree.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and _is_test(one):
            yield one.name
        if isinstance(one, ast.ClassDef) and not _hides_tests(one):
            family = list(_family(one, classes, set()))
            is_unit = any(_is_test_case(base) for member in family for base in member.bases)
            if not is_unit and not one.name.startswith("Test"):
                continue
            methods = dict.fromkeys(
                part.name
                for member in reversed(family)
                for part in member.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and _is_test(part)
            )
            yield from (f"{one.name}.{name}" for name in methods)
            if is_unit and not methods and any(_is_doing(part) for part in tree.body):
                yield one.name  # methods that are made when it runs


def _is_test(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_fixture = any("fixture" in ast.unparse(one) for one in function.decorator_list)
    return function.name.startswith("test") and not is_fixture


def _hides_tests(kind: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.Assign) and ast.unparse(one) == "__test__ = False" for one in kind.body)


def _family(kind: ast.ClassDef, classes: dict[str, ast.ClassDef], seen: set[str]) -> Iterator[ast.ClassDef]:
    """A class, and those of its bases that the text defines."""
    if kind.name in seen:
        return
    seen.add(kind.name)
    yield kind
    for base in kind.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _family(classes[base.id], classes, seen)


def _is_test_case(base: ast.expr) -> bool:
    return ast.unparse(base).rpartition(".")[2].endswith("TestCase")


def _own_names(tree: ast.Module, entry_point: str) -> tuple[str, ...]:
    """Names of Python's or the prelude's that mean the program's in these tests.

    The entry point, what is imported from the program, and all of them if the tests name nothing else that a program
    must define: ``assert sum(1, 2) == 3``.
    """
    loaded = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    free = loaded - _bound_names(tree)
    imported = {alias.name for alias in _of_program(tree)}
    asked = {entry_point.partition(".")[0], *imported} & _KNOWN
    is_clear = bool(imported) or bool(free - _KNOWN) or entry_point in free
    return tuple(sorted(asked | (set() if is_clear else free & _KNOWN - {"print", "__name__"})))


def _of_program(tree: ast.Module) -> list[ast.alias]:
    """Names that the text imports from the program."""
    found = (one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module in MODULES)
    return [alias for one in found for alias in one.names]


def _bound_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for one in ast.walk(tree):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(one.name)
        elif isinstance(one, ast.arg):
            found.add(one.arg)
        elif isinstance(one, ast.alias):
            found.add((one.asname or one.name).partition(".")[0])
        elif isinstance(one, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and one.name:
            found.add(one.name)
    return found


def _check_usable(tree: ast.Module, where: str) -> None:
    """Raises DataError for what tests in another process than the program's can not do, or the sandbox lacks."""
    bound = _bound_names(tree) - {alias.asname or alias.name for alias in _of_program(tree)}
    imports = {
        (alias.asname or alias.name): alias.name
        for one in ast.walk(tree)
        if isinstance(one, ast.Import)
        for alias in one.names
    }
    fixtures = {
        one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and not one.name.startswith("test")
    }
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and imports.get(one.value.id) == "pytest":
            _check_offered(one.attr, where)
        if isinstance(one, ast.ImportFrom) and one.module == "pytest":
            for alias in one.names:
                _check_offered(alias.name, where)
        if isinstance(one, ast.FunctionDef) and _is_test(one):
            unknown = {arg.arg for arg in one.args.args} & set(_UNKNOWN_FIXTURES) - fixtures
            if unknown:
                raise DataError(
                    f"{where}: {one.name} has the fixture {min(unknown)!r}; the sandbox has {', '.join(FIXTURES)}"
                )
        if isinstance(one, ast.ClassDef):
            _check_bases(one, bound, where)
        if isinstance(one, ast.Call):
            _check_patch(one, imports, where)


def _check_offered(name: str, where: str) -> None:
    if name not in OFFERED:
        raise DataError(f"{where}: it uses pytest.{name}; the sandbox has pytest's {', '.join(OFFERED)}")


def _check_bases(kind: ast.ClassDef, bound: set[str], where: str) -> None:
    for base in kind.bases:
        name = ast.unparse(base).partition(".")[0].partition("[")[0]
        if name in MODULES or (name not in bound and name not in _KNOWN):
            raise DataError(
                f"{where}: class {kind.name} is made of the program's {printable(ast.unparse(base))}, which is in "
                f"another process; tests may make and call a program's classes, not derive from them"
            )


def _check_patch(call: ast.Call, imports: dict[str, str], where: str) -> None:
    """A test may replace what is in the program, and the streams; the program would not see anything else replaced."""
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    is_patch = method == "patch" or name.endswith(("patch.object", "patch.dict", "monkeypatch.setattr"))
    is_environment = name.endswith(("monkeypatch.setenv", "monkeypatch.delenv", "monkeypatch.syspath_prepend"))
    if not (is_patch or is_environment) or not (call.args or is_environment):
        return
    target = "" if is_environment else ast.unparse(call.args[0]).strip("'\"")
    if name.endswith(("patch.object", "monkeypatch.setattr")) and isinstance(call.args[0], ast.Name | ast.Attribute):
        first, _, rest = target.partition(".")
        dotted = ".".join(part for part in (imports.get(first, first), rest) if part)
        attribute = ast.unparse(call.args[1]).strip("'\"") if len(call.args) > 1 else ""
        if first not in imports or f"{dotted}.{attribute}" in _STREAMS or dotted.partition(".")[0] in MODULES:
            return
        target = f"{dotted}.{attribute}"
    elif target in _STREAMS or target.partition(".")[0] in MODULES or name.endswith("patch.dict"):
        return
    raise DataError(
        f"{where}: it replaces {printable(target or 'the environment')}, which the program does not see: it is in "
        f"another process; tests may replace what is in solution, and {', '.join(_STREAMS)}"
    )
