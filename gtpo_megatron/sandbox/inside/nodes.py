"""LeetCode's linked lists and trees, which its tests write as lists: arguments are built of them, and results unbuilt.

A kind is the name of a class, ``ListNode`` or ``TreeNode``; ``[ListNode]`` is a list of such; "" is any other value. It
is read from an annotation. Runs inside the sandbox too; needs the standard library only.
"""

import re
from typing import Any

_NODE = re.compile(r"\b(ListNode|TreeNode)\b")
_LIST = re.compile(r"\b(?:List|list)\[")


def kind_of(annotation: str) -> str:
    """The kind of what has this annotation."""
    found = _NODE.search(annotation)
    if found is None:
        return ""
    return f"[{found[1]}]" if _LIST.search(annotation) else found[1]


def kinds_of(function: Any) -> tuple[str, ...]:
    """The kinds of a function's arguments, and behind them of its result."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    said = getattr(function, "__annotations__", {})
    code = getattr(function, "__code__", None)
    if not said or code is None:
        return ()
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    return tuple(
        kind_of(one.__name__ if isinstance(one, type) else str(one))
        for one in (said.get(name, "") for name in (*names, "return"))
    )


def built(value: Any, kind: str, classes: Any) -> Any:
    """An argument of a kind.

    Args:
        value: a value of JSON.
        kind: see above.
        classes: the program's names, which may have a class of its own.
    """
    if kind.startswith("[") and isinstance(value, list):
        return [built(one, kind[1:-1], classes) for one in value]
    make = classes(kind) if kind and isinstance(value, list) else None
    if make is None:
        return value
    return _linked(value, make) if kind == "ListNode" else _tree(value, make)


def _linked(values: list[Any], make: Any) -> Any:
    head = None
    for value in reversed(values):
        node = make(value)
        node.next = head
        head = node
    return head


def _tree(values: list[Any], make: Any) -> Any:
    """A tree of its values from top to bottom and from left to right, None where there is no node."""
    if not values or values[0] is None:
        return None
    root = make(values[0])
    waiting, rest = [root], iter(values[1:])
    for parent in waiting:
        for side in ("left", "right"):
            value = next(rest, None)
            node = None if value is None else make(value)
            setattr(parent, side, node)
            if node is not None:
                waiting.append(node)
    return root


def unbuilt(value: Any, kind: str = "") -> Any:
    """A returned value as a test writes it; an empty list or tree is None, so that its kind must say that it is one.

    Raises:
        ValueError: a list or a tree leads back into itself.
    """
    if value is None and kind in ("ListNode", "TreeNode"):
        return []
    if isinstance(value, list | tuple) and kind.startswith("["):
        return [unbuilt(one, kind[1:-1]) for one in value]
    name = type(value).__name__
    if name == "ListNode" and hasattr(value, "next"):
        return _values_of_list(value)
    if name == "TreeNode" and hasattr(value, "left"):
        return _values_of_tree(value)
    return value


def _values_of_list(node: Any) -> list[Any]:
    values, seen = [], set()
    while node is not None:
        if id(node) in seen:
            raise ValueError("the returned list leads back into itself")
        seen.add(id(node))
        values.append(node.val)
        node = node.next
    return values


def _values_of_tree(root: Any) -> list[Any]:
    values: list[Any] = []
    waiting, seen = [root], set()
    for node in waiting:
        if node is None:
            values.append(None)
            continue
        if id(node) in seen:
            raise ValueError("the returned tree leads back into itself")
        seen.add(id(node))
        values.append(node.val)
        waiting += [node.left, node.right]
    while values and values[-1] is None:
        values.pop()
    return values
