"""Names that a program may use without an import, as those who set its problem supply them (LeetCode, LiveCodeBench).

They lie beneath the program, among Python's own names: whatever it defines or imports hides them, lines keep their
numbers, and a name of Python's own keeps its meaning. Runs inside the sandbox; needs the standard library only.
"""

import builtins
import importlib.util
import sys
import types
from typing import Any

STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
"""Modules all of whose public names are supplied, a later one hiding an earlier one (LiveCodeBench's order)."""

MODULES = (*STARRED, "decimal", "fractions", "os", "queue", "time")
"""Modules supplied by their names."""

STREAMS = ("stdin", "stdout", "stderr", "argv")
"""Names of ``sys`` that are another object in each process."""

CLASSES = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right


def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def tree_node(values):
    if not values or values[0] is None:
        return None
    root = TreeNode(values[0])
    waiting, rest = [root], iter(values[1:])
    for parent in waiting:
        for side in ("left", "right"):
            value = next(rest, None)
            if value is not None:
                setattr(parent, side, TreeNode(value))
                waiting.append(getattr(parent, side))
    return root


def is_same_list(one, other):
    while one is not None and other is not None:
        if one.val != other.val:
            return False
        one, other = one.next, other.next
    return one is None and other is None


def is_same_tree(one, other):
    waiting = [(one, other)]
    for one, other in waiting:
        if one is None or other is None:
            if one is not None or other is not None:
                return False
            continue
        if one.val != other.val:
            return False
        waiting += [(one.left, other.left), (one.right, other.right)]
    return True


inf, nan = float("inf"), float("nan")
"""
"""LeetCode's lists and trees, with functions that make and compare them."""

SORTED = ("SortedDict", "SortedList", "SortedSet")
"""LeetCode's, where that package is."""

NODES = ("ListNode", "TreeNode")


def names(text: str | None = None) -> dict[str, Any]:
    """The names of a prelude by themselves.

    Args:
        text: Python that binds them; None: those that are described above.
    """
    found: dict[str, Any] = {}
    if text is None:
        for name in STARRED:
            module = importlib.import_module(name)
            public = getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]
            found |= {one: getattr(module, one) for one in public if one not in STREAMS}
        found |= {name: importlib.import_module(name) for name in MODULES}
        if importlib.util.find_spec("sortedcontainers") is not None:
            found |= {name: getattr(importlib.import_module("sortedcontainers"), name) for name in SORTED}
        text = CLASSES
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "prelude.py", "exec", dont_inherit=True), space)
    found |= {name: value for name, value in space.items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if not hasattr(builtins, name)}


def for_tests(supplied: dict[str, Any]) -> dict[str, Any]:
    """The names that tests get: no functions of Python's modules, which a problem may ask a program for (``gcd``)."""
    return {
        name: value
        for name, value in supplied.items()
        if name not in NODES
        and (
            not callable(value) or isinstance(value, type) or getattr(value, "__module__", "") in ("typing", "program")
        )
    }


def origins(supplied: dict[str, Any]) -> dict[str, tuple[str, str] | None]:
    """Module and name of each supplied name ("" for a module); None for those that are no module's.

    Args:
        supplied: as :func:`names` gives them.
    """
    found: dict[str, tuple[str, str] | None] = {}
    for name, value in supplied.items():
        place = str(getattr(value, "__module__", "")).partition(".")[0]
        if isinstance(value, types.ModuleType):
            found[name] = (value.__name__, "")
        else:
            found[name] = (place, name) if place in sys.stdlib_module_names else None
    for name in STARRED:
        public = vars(importlib.import_module(name))
        found |= {one: (name, one) for one in supplied if one in public and public[one] is supplied[one]}
    return found
