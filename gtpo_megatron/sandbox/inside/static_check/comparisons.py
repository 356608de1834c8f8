"""Whether ``==``, ``<``, ``in`` and arithmetic of a program's classes are honest with values, as their text shows.

They are given the other side of a comparison. Those of a program that shares the process of its tests decide about
objects of its own classes only: with any other value they return NotImplemented or False, raise, or read an attribute
that no value has; or they calculate, and what they make is an object of their class that turns into no number. Runs
inside the sandbox; needs the standard library only.
"""

import ast

from gtpo_megatron.sandbox.inside.special_methods import ARITHMETIC, is_dunder
from gtpo_megatron.sandbox.inside.static_check import allowlist
from gtpo_megatron.sandbox.inside.static_check.scopes import bindings

SCOPED = (
    ast.AsyncFunctionDef, ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Yield,
    ast.YieldFrom, ast.Await, ast.Try, ast.Delete,
)  # fmt: skip
"""What no method may have that is looked into here."""


def is_honest(classes, kind, method):
    """Whether a method has one of the forms of :class:`BinaryMethod`.

    Args:
        classes: classes of the program.
        kind: class of the method.
        method: definition of the method.
    """
    if not isinstance(method, ast.FunctionDef) or method.decorator_list:
        return False
    given = method.args
    names = [one.arg for one in given.args]
    if len(names) != 2 or given.posonlyargs or given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        return False
    inner = [one for part in method.body for one in ast.walk(part)]
    bound = {name for one in inner for name in bindings(one)}
    if bound & set(names) or any(isinstance(one, SCOPED) for one in inner):
        return False
    if {"isinstance", "type", "NotImplemented"} & classes.names.bound.keys():
        return False
    body = [one for one in method.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    form = BinaryMethod(classes, kind, method.name, *names)
    if method.name == "__contains__" and len(body) == 1 and form.looks_into(body[0]):
        return True
    return bool(body) and (form.is_guarded(body) or form.reads_own(body[0]) or form.makes_own(body))


class BinaryMethod:
    """A method that knows another object, and the forms in which it is honest with values.

    Args:
        classes: classes of the program.
        kind: class of the method.
        method: name of the method.
        this: name of the parameter for the object.
        other: name of the one for the other object.
    """

    def __init__(self, classes, kind, method, this, other):
        self.classes, self.kind, self.method, self.this, self.other = classes, kind, method, this, other

    def is_guarded(self, body):
        """Whether the first statement sends all objects of other classes away."""
        first, rest = body[0], body[1:]
        if isinstance(first, ast.If):
            asked = self._asks_class(first.test)
            if asked is False:
                return self._refuses(first.body)
            return asked is True and self._refuses([*first.orelse, *rest])
        value = first.value if isinstance(first, ast.Return) and not rest else None
        if isinstance(value, ast.BoolOp):
            asked = self._asks_class(value.values[0])
            if isinstance(value.op, ast.And):  # False for all others
                return asked is True and self.method in ("__eq__", "__contains__")
            return asked is False and self.method == "__ne__"
        if isinstance(value, ast.IfExp):
            asked = self._asks_class(value.test)
            return asked is not None and self._is_refusal(value.orelse if asked else value.body)
        return False

    def _asks_class(self, node):
        """True if an expression holds for objects of own classes only, False if for all others, None if neither."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            asked = self._asks_class(node.operand)
            return None if asked is None else not asked
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and len(node.args) == 2:
            is_own = self._is_other(node.args[0]) and self.classes.is_own(node.args[1], self.this)
            return True if is_own else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = (node.left, node.comparators[0])
            for one, two in (sides, sides[::-1]):
                if is_class_of(one, self.other) and self.classes.is_own(two, self.this):
                    return {ast.Is: True, ast.Eq: True, ast.IsNot: False, ast.NotEq: False}.get(type(node.ops[0]))
        return None

    def _is_other(self, node):
        return isinstance(node, ast.Name) and node.id == self.other

    def _refuses(self, body):
        """Whether statements return what is no verdict about another object, or raise, and hand it to nobody."""
        if len(body) != 1:
            return False
        if isinstance(body[0], ast.Raise):
            return not any(self._is_other(one) for one in ast.walk(body[0]))
        return isinstance(body[0], ast.Return) and self._is_refusal(body[0].value)

    def _is_refusal(self, value):
        if isinstance(value, ast.Name):
            return value.id == "NotImplemented"
        verdict = {"__eq__": False, "__contains__": False, "__ne__": True}.get(self.method)
        return verdict is not None and isinstance(value, ast.Constant) and value.value is verdict

    def reads_own(self, first):
        """Whether the first statement reads, whatever happens, an attribute of the other that no value has."""
        waiting = [first.value] if isinstance(first, ast.Return | ast.Assign) and first.value else []
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.BoolOp):
                waiting.append(node.values[0])
            elif isinstance(node, ast.Compare):
                waiting += [node.left, node.comparators[0]]
            elif isinstance(node, ast.IfExp):
                waiting.append(node.test)
            elif isinstance(node, ast.Attribute) and self._is_other(node.value):
                is_own = node.attr not in allowlist.attributes_of_values() and not is_dunder(node.attr)
                if is_own or node.attr == "__dict__":  # the names of what is no object of its own are not given
                    return True
            elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Attribute | ast.Call):
                waiting += ast.iter_child_nodes(node)
            elif isinstance(node, ast.keyword | ast.Starred | ast.Subscript):
                waiting.append(node.value)
        return False

    def makes_own(self, body):
        """Whether arithmetic makes objects of its own class, which are near to no number."""
        if self.method not in ARITHMETIC:
            return False
        if "__new__" in self.classes.methods or self.classes.value_kinds(self.kind):
            return False  # what it makes may be a value
        returned = [one.value for part in body for one in ast.walk(part) if isinstance(one, ast.Return)]
        if not returned or not all(self._is_made_here(one) for one in returned):
            return False
        return self.method in allowlist.SCALING or not self.classes.methods & allowlist.TO_NUMBER

    def _is_made_here(self, value):
        if isinstance(value, ast.Name):
            return value.id in ("NotImplemented", self.this)
        if not isinstance(value, ast.Call):
            return False
        is_named = getattr(value.func, "id", "") == self.kind.name and self.classes.is_own(value.func, self.this)
        return is_named or is_class_of(value.func, self.this)

    def looks_into(self, statement):
        """``return x in self.items``."""
        value = statement.value if isinstance(statement, ast.Return) else None
        if not (isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], ast.In)):
            return False
        inner = {one.id for one in ast.walk(value.comparators[0]) if isinstance(one, ast.Name)}
        return self._is_other(value.left) and self.other not in inner


def is_class_of(node, name):
    """``type(name)`` or ``name.__class__``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and isinstance(node.value, ast.Name) and node.value.id == name
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type" and len(node.args) == 1):
        return False
    return isinstance(node.args[0], ast.Name) and node.args[0].id == name
