"""The classes of a program: what they are made of, and whether their objects know what they are compared with.

``__eq__`` and its kin are given the other side of a comparison; a plain program's decide about objects of its own
classes only. With any other value they return NotImplemented or False, raise, or read an attribute that no value has;
or they calculate, and what they make is an object of their class that turns into no number. Runs inside the sandbox;
needs the standard library only.
"""

import ast
import collections

from gtpo_megatron.sandbox.inside import plain_tables as tables
from gtpo_megatron.sandbox.inside.plain_tables import Apart, is_dunder
from gtpo_megatron.sandbox.inside.scopes import bindings

HIDING = (ast.AsyncFunctionDef, ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal)
SCOPED = (*HIDING, ast.Yield, ast.YieldFrom, ast.Await, ast.Try, ast.Delete)
"""What no method may have that is looked into here."""


class Classes:
    """The classes of a program.

    Args:
        reader: of the program.
        statements: of its module.
        is_named: tells whether the tests may name something.
    """

    def __init__(self, reader, statements, is_named):
        self.reader, self.is_named, self.top = reader, is_named, set(statements)
        self.by_name = {node.name: node for node in reader.nodes if isinstance(node, ast.ClassDef)}
        self.attributes = {node.attr for node in reader.nodes if isinstance(node, ast.Attribute)}
        self.methods = {one.name for kind in self.by_name.values() for one in kind.body if hasattr(one, "name")}
        self.of_values = {name for kind in self.by_name.values() for one in self.value_kinds(kind) for name in dir(one)}

    # --------------------------------------------------------------------------------------------------- dunder names

    def is_method(self, node, name):
        """Whether a dunder name is a method of a class, or another name for one (``__radd__ = __add__``)."""
        owner = self.reader.parents.get(node)
        is_known = name in tables.DEFINED or name in tables.BINARY
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return isinstance(owner, ast.ClassDef) and is_known
        if not (isinstance(node, ast.Name) and isinstance(owner, ast.Assign) and isinstance(owner.value, ast.Name)):
            return False
        body, meant = self.reader.parents.get(owner), owner.value.id
        methods = {one.name for one in getattr(body, "body", []) if isinstance(one, ast.FunctionDef)}
        return isinstance(body, ast.ClassDef) and meant in methods and _is_renaming(name, meant)

    def is_renamed(self, node):
        """Whether a dunder name is read to give a method another name."""
        parent = self.reader.parents.get(node)
        return isinstance(parent, ast.Assign) and all(
            isinstance(one, ast.Name) and self.is_method(one, one.id) for one in parent.targets
        )

    def may_register(self, modules, imported):
        """Whether a program has hold of classes that take others in by ``register``."""
        used = {*modules, *(module for module, name in imported if module != "typing" or _is_abstract(name))}
        names = {node.id for node in self.reader.nodes if isinstance(node, ast.Name)}
        return (
            bool(used & set(tables.OF_REGISTRIES))
            or any(_is_abstract(name) for name in names)
            or any(self.is_registry(kind) for kind in self.by_name.values())
        )

    def is_registry(self, kind):
        """Whether a class has a ``register``."""
        family = self.family(kind)
        return bool(kind.keywords) or any(one in ("ABC", *tables.USER) or _is_abstract(one) for one in family)

    # --------------------------------------------------------------------------------------------------------- classes

    def look_at(self, kind):
        """Raises Apart for a class that is made of what is not known, or whose objects may answer as they like."""
        for one in kind.keywords:
            if one.arg is None or (one.arg == "metaclass" and self.reader.named(one.value) != "ABCMeta"):
                raise Apart(f"it has a metaclass for {kind.name}")
        for base in kind.bases:
            if not self._is_known(base.value if isinstance(base, ast.Subscript) else base):
                raise Apart(f"{kind.name} is made of {ast.unparse(base)}")
        family = self.family(kind)
        if family & set(tables.ENUMS) and not any(map(_has_member, kind.body)):
            raise Apart(f"{kind.name} has no members, so that calls of it make classes")
        for one in kind.body:
            name = getattr(one, "name", "")
            if name in tables.BINARY and not self._is_honest(kind, one):
                raise Apart(f"{kind.name}.{name} may answer as it likes")
        hidden = {name for value in self.value_kinds(kind) for name in dir(value) if not is_dunder(name)}
        own = {name for one in kind.body for name in _bound_by(one)}
        if own & hidden and not self.is_named(kind.name):
            raise Apart(f"{kind.name}.{min(own & hidden)} stands for a method of a value")

    def _is_known(self, base):
        """Whether a class may be made of a base."""
        reader = self.reader
        if isinstance(base, ast.Call):
            return reader.named(base.func) in tables.TUPLES
        own = base.id if isinstance(base, ast.Name) and reader.bound.get(base.id) == 1 else ""
        if own in self.by_name or self._is_named_tuple(own):
            return True
        module, name = reader.meaning(base) or ("", "")
        if module == "builtins":
            kind = getattr(tables.builtins, name)
            is_value = kind in tables.VALUES and kind not in (type, BaseException)
            return isinstance(kind, type) and (is_value or kind is object or issubclass(kind, Exception))
        if name in tables.SET_LIKE:
            return False
        if module == "collections.abc" or name in tables.BASES or (module == "typing" and _is_abstract(name)):
            return True
        return module in tables.WITH_ERRORS and name.endswith(("Error", "Empty", "Full"))

    def _is_named_tuple(self, name):
        """Whether a name is bound once, to a named tuple."""
        if self.reader.bound.get(name) != 1:
            return False
        found = [
            node.value
            for node in self.reader.nodes
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)
        ]
        return bool(found) and isinstance(found[0], ast.Call) and self.reader.named(found[0].func) in tables.TUPLES

    def family(self, kind, seen=()):
        """The names of all bases of a class, as far as the program shows them."""
        found = set()
        for given in kind.bases:
            base = given.value if isinstance(given, ast.Subscript) else given
            name = getattr(base, "id", "")
            if isinstance(base, ast.Call) or self._is_named_tuple(name):
                found.add("NamedTuple")
            elif name in self.by_name:
                found |= {name} if name in seen else {name} | self.family(self.by_name[name], (*seen, name))
            else:
                found.add(self.reader.named(base))
        return found

    def value_kinds(self, kind):
        """The classes of values that a class is made of."""
        found = []
        for name in self.family(kind):
            own = getattr(tables.builtins, name, None)
            if name in tables.VALUE_BASES:
                found.append(tables.VALUE_BASES[name] or getattr(collections, name))
            elif isinstance(own, type) and own in tables.VALUES and not issubclass(own, BaseException):
                found.append(own)
            elif _is_abstract(name):
                found.append(getattr(collections.abc, name))
        return found

    def is_own(self, node, this):
        """Whether an expression is a class of the program that cannot stand for values, or the object's own class."""
        if isinstance(node, ast.Tuple):
            return bool(node.elts) and all(self.is_own(one, this) for one in node.elts)
        if _is_class_of(node, this):
            return True
        kind = self.by_name.get(getattr(node, "id", ""))
        if kind is None or kind not in self.top or self.reader.bound.get(kind.name) != 1:
            return False
        decorators = [one.func if isinstance(one, ast.Call) else one for one in kind.decorator_list]
        return (
            all(self.reader.named(one) in tables.KEEPING for one in decorators)
            and not any(isinstance(one, ast.Call) and one.args for one in kind.decorator_list)
            and "Protocol" not in self.family(kind)
            and not ("register" in self.attributes and self.is_registry(kind))
        )

    # ------------------------------------------------------------------------------------------- __eq__ and its kin

    def _is_honest(self, kind, method):
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
        if {"isinstance", "type", "NotImplemented"} & self.reader.bound.keys():
            return False
        body = [one for one in method.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        form = Form(self, kind, method.name, *names)
        if method.name == "__contains__" and len(body) == 1 and form.looks_into(body[0]):
            return True
        return bool(body) and (form.is_guarded(body) or form.reads_own(body[0]) or form.makes_own(body))


class Form:
    """Forms of a method that knows another object.

    Args:
        classes: of the program.
        kind: the class of the method.
        method: its name.
        this: name of the object's parameter.
        other: of the other one's.
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
                if _is_class_of(one, self.other) and self.classes.is_own(two, self.this):
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
                is_own = node.attr not in tables.attributes_of_values() and not is_dunder(node.attr)
                if is_own or node.attr == "__dict__":  # the names of what is no object of its own are not given
                    return True
            elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Attribute | ast.Call):
                waiting += ast.iter_child_nodes(node)
            elif isinstance(node, ast.keyword | ast.Starred | ast.Subscript):
                waiting.append(node.value)
        return False

    def makes_own(self, body):
        """Whether arithmetic makes objects of its own class, which are near to no number."""
        if self.method not in tables.ARITHMETIC:
            return False
        if "__new__" in self.classes.methods or self.classes.value_kinds(self.kind):
            return False  # what it makes may be a value
        returned = [one.value for part in body for one in ast.walk(part) if isinstance(one, ast.Return)]
        if not returned or not all(self._is_made_here(one) for one in returned):
            return False
        return self.method in tables.SCALING or not self.classes.methods & tables.TO_NUMBER

    def _is_made_here(self, value):
        if isinstance(value, ast.Name):
            return value.id in ("NotImplemented", self.this)
        if not isinstance(value, ast.Call):
            return False
        is_named = getattr(value.func, "id", "") == self.kind.name and self.classes.is_own(value.func, self.this)
        return is_named or _is_class_of(value.func, self.this)

    def looks_into(self, statement):
        """``return x in self.items``."""
        value = statement.value if isinstance(statement, ast.Return) else None
        if not (isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], ast.In)):
            return False
        inner = {one.id for one in ast.walk(value.comparators[0]) if isinstance(one, ast.Name)}
        return self._is_other(value.left) and self.other not in inner


def _is_renaming(name, meant):
    """Whether a method may have another's name: no comparison, and of arithmetic the same operator."""
    if name in tables.ARITHMETIC and meant in tables.ARITHMETIC:
        return tables.OPERATORS[name] == tables.OPERATORS[meant]
    return name in tables.DEFINED and meant in tables.DEFINED


def _has_member(statement):
    """Whether a statement of an enumeration makes a member."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(one, ast.Name) and not one.id.startswith("_") for one in targets)


def _is_abstract(name):
    return name in (tables.names_of("collections.abc") or ())


def _is_class_of(node, name):
    """``type(name)`` or ``name.__class__``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and isinstance(node.value, ast.Name) and node.value.id == name
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type" and len(node.args) == 1):
        return False
    return isinstance(node.args[0], ast.Name) and node.args[0].id == name


def _bound_by(statement):
    """The names that a statement of a class binds in it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    return [name for one in ast.walk(statement) for name in bindings(one)]
