"""The classes of a program: what they are made of, and which of their methods may do what they like.

Runs inside the sandbox; needs the standard library only.
"""

import ast
import collections

from gtpo_megatron.sandbox.inside.special_methods import is_dunder
from gtpo_megatron.sandbox.inside.static_check import allowlist
from gtpo_megatron.sandbox.inside.static_check.allowlist import NotAllowed
from gtpo_megatron.sandbox.inside.static_check.comparisons import is_class_of, is_honest
from gtpo_megatron.sandbox.inside.static_check.scopes import bindings


class Classes:
    """The classes of a program.

    Args:
        names: meanings of its names.
        statements: statements of its module.
        is_named: tells whether the tests may name something.
    """

    def __init__(self, names, statements, is_named):
        self.names, self.is_named, self.top = names, is_named, set(statements)
        self.by_name = {node.name: node for node in names.nodes if isinstance(node, ast.ClassDef)}
        self.attributes = {node.attr for node in names.nodes if isinstance(node, ast.Attribute)}
        self.methods = {one.name for kind in self.by_name.values() for one in kind.body if hasattr(one, "name")}
        self.of_values = {name for kind in self.by_name.values() for one in self.value_kinds(kind) for name in dir(one)}

    # --------------------------------------------------------------------------------------------------- dunder names

    def is_method(self, node, name):
        """Whether a dunder name is a method of a class, or another name for one (``__radd__ = __add__``)."""
        owner = self.names.parents.get(node)
        is_known = name in allowlist.DEFINED or name in allowlist.BINARY
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return isinstance(owner, ast.ClassDef) and is_known
        if not (isinstance(node, ast.Name) and isinstance(owner, ast.Assign) and isinstance(owner.value, ast.Name)):
            return False
        body, meant = self.names.parents.get(owner), owner.value.id
        methods = {one.name for one in getattr(body, "body", []) if isinstance(one, ast.FunctionDef)}
        return isinstance(body, ast.ClassDef) and meant in methods and _is_renaming(name, meant)

    def is_renamed(self, node):
        """Whether a dunder name is read to give a method another name."""
        parent = self.names.parents.get(node)
        return isinstance(parent, ast.Assign) and all(
            isinstance(one, ast.Name) and self.is_method(one, one.id) for one in parent.targets
        )

    def may_register(self):
        """Whether a program has hold of classes that take others in by ``register``."""
        imported = self.names.imported.values()
        used = {module for module, name in imported if module != "typing" or _is_abstract(name)}
        used.update(self.names.modules.values())
        names = {node.id for node in self.names.nodes if isinstance(node, ast.Name)}
        return (
            bool(used & set(allowlist.OF_REGISTRIES))
            or any(_is_abstract(name) for name in names)
            or any(self.is_registry(kind) for kind in self.by_name.values())
        )

    def is_registry(self, kind):
        """Whether a class has a ``register``."""
        family = self.family(kind)
        return bool(kind.keywords) or any(one in ("ABC", *allowlist.USER) or _is_abstract(one) for one in family)

    # --------------------------------------------------------------------------------------------------------- classes

    def look_at(self, kind):
        """Raises NotAllowed for a class that is made of what is not known, or whose objects may answer as they like."""
        for one in kind.keywords:
            if one.arg is None or (one.arg == "metaclass" and self.names.named(one.value) != "ABCMeta"):
                raise NotAllowed(f"it has a metaclass for {kind.name}")
        for base in kind.bases:
            if not self._is_known(base.value if isinstance(base, ast.Subscript) else base):
                raise NotAllowed(f"{kind.name} is made of {ast.unparse(base)}")
        family = self.family(kind)
        if family & set(allowlist.ENUMS) and not any(map(_has_member, kind.body)):
            raise NotAllowed(f"{kind.name} has no members, so that calls of it make classes")
        for one in kind.body:
            name = getattr(one, "name", "")
            if name in allowlist.BINARY and not is_honest(self, kind, one):
                raise NotAllowed(f"{kind.name}.{name} may answer as it likes")
        hidden = {name for value in self.value_kinds(kind) for name in dir(value) if not is_dunder(name)}
        own = {name for one in kind.body for name in _bound_by(one)}
        if own & hidden and not self.is_named(kind.name):
            raise NotAllowed(f"{kind.name}.{min(own & hidden)} stands for a method of a value")

    def _is_known(self, base):
        """Whether a class may be made of a base."""
        names = self.names
        if isinstance(base, ast.Call):
            return names.named(base.func) in allowlist.TUPLES
        own = base.id if isinstance(base, ast.Name) and names.bound.get(base.id) == 1 else ""
        if own in self.by_name or self._is_named_tuple(own):
            return True
        module, name = names.meaning(base) or ("", "")
        if module == "builtins":
            kind = getattr(allowlist.builtins, name)
            is_value = kind in allowlist.VALUES and kind not in (type, BaseException)
            return isinstance(kind, type) and (is_value or kind is object or issubclass(kind, Exception))
        if name in allowlist.SET_LIKE:
            return False
        if module == "collections.abc" or name in allowlist.BASES or (module == "typing" and _is_abstract(name)):
            return True
        return module in allowlist.WITH_ERRORS and name.endswith(("Error", "Empty", "Full"))

    def _is_named_tuple(self, name):
        """Whether a name is bound once, to a named tuple."""
        if self.names.bound.get(name) != 1:
            return False
        found = [
            node.value
            for node in self.names.nodes
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)
        ]
        return bool(found) and isinstance(found[0], ast.Call) and self.names.named(found[0].func) in allowlist.TUPLES

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
                found.add(self.names.named(base))
        return found

    def value_kinds(self, kind):
        """The classes of values that a class is made of."""
        found = []
        for name in self.family(kind):
            own = getattr(allowlist.builtins, name, None)
            if name in allowlist.VALUE_BASES:
                found.append(allowlist.VALUE_BASES[name] or getattr(collections, name))
            elif isinstance(own, type) and own in allowlist.VALUES and not issubclass(own, BaseException):
                found.append(own)
            elif _is_abstract(name):
                found.append(getattr(collections.abc, name))
        return found

    def is_own(self, node, this):
        """Whether an expression is a class of the program that cannot stand for values, or the object's own class."""
        if isinstance(node, ast.Tuple):
            return bool(node.elts) and all(self.is_own(one, this) for one in node.elts)
        if is_class_of(node, this):
            return True
        kind = self.by_name.get(getattr(node, "id", ""))
        if kind is None or kind not in self.top or self.names.bound.get(kind.name) != 1:
            return False
        decorators = [one.func if isinstance(one, ast.Call) else one for one in kind.decorator_list]
        return (
            all(self.names.named(one) in allowlist.KEEPING for one in decorators)
            and not any(isinstance(one, ast.Call) and one.args for one in kind.decorator_list)
            and "Protocol" not in self.family(kind)
            and not ("register" in self.attributes and self.is_registry(kind))
        )


def _is_renaming(name, meant):
    """Whether a method may have another's name: no comparison, and of arithmetic the same operator."""
    if name in allowlist.ARITHMETIC and meant in allowlist.ARITHMETIC:
        return allowlist.OPERATORS[name] == allowlist.OPERATORS[meant]
    return name in allowlist.DEFINED and meant in allowlist.DEFINED


def _has_member(statement):
    """Whether a statement of an enumeration makes a member."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(one, ast.Name) and not one.id.startswith("_") for one in targets)


def _is_abstract(name):
    return name in (allowlist.names_of("collections.abc") or ())


def _bound_by(statement):
    """The names that a statement of a class binds in it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    return [name for one in ast.walk(statement) for name in bindings(one)]
