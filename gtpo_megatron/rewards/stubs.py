"""The beginning of a program that a problem gives: what a response that lacks it needs of it, and its annotations."""

import ast
from functools import lru_cache

from gtpo_megatron.sandbox.inside.nodes import kind_of

READ_STUBS = 64


@lru_cache(maxsize=READ_STUBS)
def kinds_in(stub: str, function: str) -> tuple[str, ...]:
    """The kinds of a function's arguments and of its result (``sandbox/inside/nodes.py``); () if it is not there."""
    tree = _tree(stub)
    if tree is None:
        return ()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            said = [one.annotation for one in node.args.args if one.arg != "self"] + [node.returns]
            return tuple("" if one is None else kind_of(ast.unparse(one)) for one in said)
    return ()


def completed(program: str, stub: str, entry_point: str) -> tuple[str, str]:
    """The program, behind its stub if it is the body only; and what of the stub is run before it, so that it has it."""
    if not stub.strip():
        return program, ""
    if program[:1] in (" ", "\t"):
        return f"{stub.rstrip()}\n{program}", ""
    tree = _tree(stub)
    if tree is None:
        return program, "\n".join(one for one in stub.splitlines() if one.startswith(("import ", "from ")))
    names = {entry_point.partition("(")[0], entry_point.rpartition(".")[2]}
    tree.body = [one for one in tree.body if not ({getattr(one, "name", "")} | _methods(one)) & names]
    return program, ast.unparse(tree)


def _tree(stub: str) -> ast.Module | None:
    """What is parsed of a stub, which may end before the body of its last function."""
    for end in ("", "\n    pass", "\n        pass"):
        try:
            return ast.parse(stub.rstrip() + end)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _methods(node: ast.stmt) -> set[str]:
    return (
        {one.name for one in node.body if isinstance(one, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else set()
    )
