"""Says why a program must not share an interpreter with its tests; a program for which it finds no reason is plain.

A plain program uses modules, names and attributes of known lists (:mod:`.plain_tables`), so that its text shows all that
it does: it reaches no frame, no code, no module's insides and no other object's class, it ends nothing, and no object of
it knows what it is compared with, other than by a form of ``__eq__`` and its kin that is honest with every value. What
cannot be seen in the text is a reason. Runs inside the sandbox; needs the standard library only.
"""

import ast

from gtpo_megatron.sandbox.inside import plain_tables as tables
from gtpo_megatron.sandbox.inside import scopes, written_text
from gtpo_megatron.sandbox.inside.scopes import bindings


class Apart(Exception):  # noqa: N818 - a reason, not a failure
    """The program must run apart."""


class Reading:
    """What is read of a program.

    Attributes:
        reason: the first one that is found why it must run apart, with its line; "" if it is plain.
        imports: see :func:`.written_text.imports_at_top`.
        own_names: names that its module binds.
    """

    def __init__(self, reason="", imports=None, own_names=frozenset()):
        self.reason, self.imports, self.own_names = reason, imports or {}, own_names


def read(texts, is_named, origins):
    """Reads the texts of a program.

    Args:
        texts: in order; they are known to compile.
        is_named: tells whether the tests may name something.
        origins: names that are supplied without an import: module and name ("" for the module) of each, or None if they
            are no module's.
    """
    try:
        trees = [ast.parse(text) for text in texts]
        reader = Reader(trees, is_named, origins)
        found = Reading(reader.reason(), written_text.imports_at_top(trees), reader.scopes.of_module)
    except RecursionError:
        return Reading("it is nested too deeply")
    return found


class Reader:
    """The nodes of a program, and what its names mean.

    Args:
        trees: of the texts.
        is_named: see :func:`read`.
        origins: likewise.
    """

    def __init__(self, trees, is_named, origins):
        self.is_named, self.origins = is_named, origins
        self.nodes = [node for tree in trees for statement in tree.body if not _is_main(statement)
                      for node in ast.walk(statement)]  # fmt: skip
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.modules, self.imported, self.bound = {}, {}, {}
        self.scopes = scopes.Scopes(self.nodes, self.parents)
        for node in self.nodes:
            for name in bindings(node):
                self.bound[name] = self.bound.get(name, 0) + 1
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._take_import(node)
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.top = {node for tree in trees for node in tree.body}
        self.attributes = {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        self.annotations = set(self._annotations())

    def reason(self):
        """The first reason why the program must run apart."""
        for node in self.nodes:
            try:
                self.look_at(node)
            except Apart as reason:
                return f"{reason} (line {getattr(node, 'lineno', 0)})"
        return ""

    # ----------------------------------------------------------------------------------------------------------- names

    def _take_import(self, node):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    self.modules[alias.asname] = alias.name
                else:
                    first = alias.name.partition(".")[0]
                    self.modules[first] = first
            return
        for alias in node.names:
            place = f"{node.module}.{alias.name}"
            if alias.name == "*":
                self.imported |= {name: (node.module, name) for name in tables.starred(node.module)}
            elif place in tables.WHOLE or place in tables.NAMES_OF:
                self.modules[alias.asname or alias.name] = place
            else:
                self.imported[alias.asname or alias.name] = (node.module, alias.name)

    def module_of(self, node):
        """The dotted name of the module that an expression is, or ""."""
        if isinstance(node, ast.Name):
            if node.id in self.modules:
                return self.modules[node.id]
            origin = self.origins.get(node.id) if self.scopes.is_supplied(node) else None
            return origin[0] if origin and not origin[1] else ""
        if isinstance(node, ast.Attribute) and (before := self.module_of(node.value)):
            place = f"{before}.{node.attr}"
            return place if place in tables.WHOLE or place in tables.NAMES_OF else ""
        return ""

    def meaning(self, node):
        """Module and name of what an expression has of a module, ``("builtins", name)``, or None."""
        if isinstance(node, ast.Attribute):
            module = self.module_of(node.value)
            return (module, node.attr) if module else None
        if not isinstance(node, ast.Name):
            return None
        if node.id in self.imported:
            return self.imported[node.id]
        if node.id in tables.BUILTINS and (node.id in tables.LOOKED_AT or self.scopes.is_supplied(node)):
            return ("builtins", node.id) if self.scopes.is_global(node) else None
        return self.origins.get(node.id) if self.scopes.is_supplied(node) else None

    def _annotations(self):
        for node in self.nodes:
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if isinstance(part, ast.AST):
                    yield from ast.walk(part)

    # ----------------------------------------------------------------------------------------------------------- nodes

    def look_at(self, node):
        """Raises Apart for what a node does that is not to be seen, or not allowed."""
        for name in bindings(node):
            if is_dunder(name) and name not in tables.ASSIGNED and not self._is_method_name(node, name):
                raise Apart(f"it defines {name}")
        look = {
            ast.Import: self._import, ast.ImportFrom: self._import_from, ast.Name: self._name,
            ast.Attribute: self._attribute, ast.Call: self._call, ast.ClassDef: self._class,
            ast.Constant: self._constant, ast.MatchClass: self._pattern,
        }.get(type(node))  # fmt: skip
        if look is not None:
            look(node)

    def _is_method_name(self, node, name):
        """Whether a dunder name is a method of a class, or another name for one (``__radd__ = __add__``)."""
        owner = self.parents.get(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return isinstance(owner, ast.ClassDef) and (name in tables.DEFINED or name in tables.BINARY)
        if not isinstance(node, ast.Name) or not isinstance(owner, ast.Assign):
            return False
        body = self.parents.get(owner)
        methods = {one.name for one in getattr(body, "body", []) if isinstance(one, ast.FunctionDef)}
        is_alias = isinstance(owner.value, ast.Name) and owner.value.id in methods
        return isinstance(body, ast.ClassDef) and is_alias and name in tables.DEFINED | tables.BINARY

    def _import(self, node):
        for alias in node.names:
            if tables.names_of(alias.name) is None:
                raise Apart(f"it imports {alias.name}")

    def _import_from(self, node):
        allowed = tables.names_of(node.module or "") if not node.level else None
        for alias in node.names:
            if alias.name == "*" and node.module in tables.STARRED:
                continue
            if allowed is None or (alias.name not in allowed and node.module != "__future__"):
                raise Apart(f"it imports {alias.name} of {node.module}")

    def _name(self, node):
        name, parent = node.id, self.parents.get(node)
        if not isinstance(node.ctx, ast.Load):
            return
        is_alias = isinstance(parent, ast.Assign) and all(
            isinstance(one, ast.Name) and self._is_method_name(one, one.id) for one in parent.targets
        )
        if is_dunder(name) and name not in ("__name__", "__doc__", "__file__", "__class__") and not is_alias:
            raise Apart(f"it uses {name}")
        if name in tables.NEVER and self.scopes.is_global(node):
            raise Apart(f"it uses {name}")
        if self.module_of(node) and not (isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)):
            raise Apart(f"it uses the module {name} as a value")
        meaning = self.meaning(node)
        if meaning == ("builtins", name):
            self._builtin(node, name, parent)
        elif meaning and not self.module_of(node):
            self._of_module(node, *meaning)

    def _builtin(self, node, name, parent):
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if name in (*tables.BY_NAME, "super") and not is_called:
            raise Apart(f"it uses {name} as a value")
        if name == "type" and not is_called and node not in self.annotations and not self._is_compared(node):
            raise Apart("it uses type as a value")

    def _of_module(self, node, module, name):
        """What is used of a module: one of its public names, and some in one form only."""
        if module in tables.WHOLE and name not in (tables.names_of(module) or ()) and module != "__future__":
            raise Apart(f"it uses {module}.{name}")
        if module in tables.NAMES_OF and name not in tables.NAMES_OF[module].split():
            raise Apart(f"it uses {module}.{name}")
        if module not in tables.WHOLE and module not in tables.NAMES_OF:
            raise Apart(f"it uses {module}.{name}")
        parent = self.parents.get(node)
        if name in tables.ENUMS and not self._is_class_use(node):
            raise Apart(f"it uses {name} otherwise than as a base")
        if name not in tables.CALLED_ONLY:
            return
        if name in ("ABCMeta", "EnumMeta", "EnumType"):
            if not (isinstance(parent, ast.keyword) and parent.arg == "metaclass" and name == "ABCMeta"):
                raise Apart(f"it uses {name} as a value")
            return
        if not (isinstance(parent, ast.Call) and parent.func is node):
            raise Apart(f"it uses {name} as a value")
        if any(isinstance(one, ast.Starred) for one in parent.args) or (name == "wraps" and parent.keywords):
            raise Apart(f"it calls {name} with more than can be seen")
        if name == "wraps" and len(parent.args) != 1:
            raise Apart("it calls wraps with more than a function")
        if name in ("attrgetter", "methodcaller"):
            given = parent.args if name == "attrgetter" else parent.args[:1]
            if not all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in given):
                raise Apart(f"it makes the names of {name}")
            for one in given:
                for part in one.value.split("."):
                    self._check_attribute(part)

    def _is_class_use(self, node):
        """Whether a class is used as a base, in an annotation or asked for by isinstance."""
        parent = self.parents.get(node)
        return (
            (isinstance(parent, ast.ClassDef) and node in parent.bases)
            or node in self.annotations
            or self._is_asked_for(node)
        )

    def _is_asked_for(self, node):
        parent = self.parents.get(node)
        if isinstance(parent, ast.Tuple):
            node, parent = parent, self.parents.get(parent)
        is_asking = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name)
        return is_asking and parent.func.id in ("isinstance", "issubclass") and node in parent.args[1:]

    def _is_compared(self, node):
        return isinstance(self.parents.get(node), ast.Compare) or self._is_asked_for(node)

    def _attribute(self, node):
        name, module = node.attr, self.module_of(node.value)
        if not isinstance(node.ctx, ast.Load):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if module or (isinstance(root, ast.Name) and (root.id in self.modules or root.id in self.imported)):
                raise Apart(f"it changes {ast.unparse(node)}")
            if is_dunder(name) or name in tables.CHECKS:
                raise Apart(f"it sets {name}")
        if module:
            if self.module_of(node):
                parent = self.parents.get(node)
                if not (isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)):
                    raise Apart(f"it uses the module {ast.unparse(node)} as a value")
                return
            self._of_module(node, module, name)
            return
        if name == "format" and not _is_plain_format(node):
            raise Apart("it calls format of a text that cannot be seen")
        if name == "__class__":
            self._check_class_use(node)
        elif is_dunder(name) and _is_super(node.value):
            if name not in tables.DEFINED | {"__setattr__", "__delattr__"} | tables.BINARY:
                raise Apart(f"it uses super().{name}")
            self._check_set_by_name(node, name)
        elif name in ("__new__", "__setattr__") and isinstance(node.value, ast.Name) and node.value.id == "object":
            self._check_set_by_name(node, name)
        else:
            self._check_attribute(name)

    def _check_set_by_name(self, node, name):
        """``object.__setattr__(self, "x", value)`` with a name that can be seen."""
        parent = self.parents.get(node)
        if not (isinstance(parent, ast.Call) and parent.func is node):
            raise Apart(f"it uses {name} as a value")
        if name in ("__setattr__", "__delattr__"):
            at = 0 if _is_super(node.value) else 1
            self._check_name_given(parent, at, is_set=True)

    def _check_attribute(self, name, *, is_set=False):
        if (is_dunder(name) and name not in tables.DUNDERS_READ) or name in tables.INSIDES:
            raise Apart(f"it uses the attribute {name}")
        if is_set and (is_dunder(name) or name in tables.CHECKS):
            raise Apart(f"it sets {name}")

    def _check_name_given(self, call, at, *, is_set):
        name = call.args[at] if len(call.args) > at else None
        if any(isinstance(one, ast.Starred) for one in call.args[: at + 1]) or not (
            isinstance(name, ast.Constant) and isinstance(name.value, str)
        ):
            raise Apart("it makes the name of an attribute")
        self._check_attribute(name.value, is_set=is_set)

    def _call(self, node):
        meaning = self.meaning(node.func)
        if meaning and meaning[0] == "builtins":
            name = meaning[1]
            if name in tables.BY_NAME:
                self._check_name_given(node, 1, is_set=name in ("setattr", "delattr"))
            if name == "type":
                if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
                    raise Apart("it makes a class by type")
                self._check_class_use(node)

    def _check_class_use(self, node):
        """``type(x)`` and ``x.__class__`` are asked for their name, compared, printed, or called as the class."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Attribute) and parent.attr in ("__name__", "__qualname__", "__doc__"):
            return
        if self._is_compared(node) or isinstance(parent, ast.FormattedValue):
            return
        if isinstance(parent, ast.Call) and parent.func is node:
            given = [*parent.args, *(one.value for one in parent.keywords if one.arg is None)]
            if (
                len(parent.args) != 3
                and len(given) == len(parent.args)
                and not any(isinstance(one, ast.Starred) for one in given)
            ):
                return
            raise Apart("it may make a class by a call of a class")
        is_printed = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name)
        if is_printed and parent.func.id in ("print", "str", "repr", "isinstance", "issubclass", "hash", "id"):
            return
        raise Apart("it keeps the class of an object")

    def _constant(self, node):
        """A text in an annotation, which may be evaluated, is one of names."""
        if not isinstance(node.value, str) or node not in self.annotations:
            return
        try:
            tree = ast.parse(node.value, mode="eval")
        except (SyntaxError, ValueError):
            raise Apart("an annotation of it is no expression") from None
        kinds = (ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr,
                 ast.Constant, ast.Load)  # fmt: skip
        for one in ast.walk(tree):
            name = getattr(one, "id", getattr(one, "attr", ""))
            if not isinstance(one, kinds) or is_dunder(name) or name in tables.NEVER:
                raise Apart("an annotation of it does more than name a type")

    def _pattern(self, node):
        for name in node.kwd_attrs:
            self._check_attribute(name)

    # --------------------------------------------------------------------------------------------------------- classes

    def _class(self, node):
        for one in node.keywords:
            if one.arg is None or (one.arg == "metaclass" and self._named(one.value) != "ABCMeta"):
                raise Apart(f"the metaclass of {node.name}")
        for base in node.bases:
            self._base(node, base)
        family = self._family(node)
        if any(name in tables.ENUMS for name in family) and not any(isinstance(one, ast.Assign) for one in node.body):
            raise Apart(f"{node.name} has no members, so that calls of it make classes")
        values = [kind for name in family if isinstance(kind := self._value_kind(name), type)]
        for one in node.body:
            name = getattr(one, "name", "")
            if isinstance(one, ast.FunctionDef) and name in tables.BINARY and not self._is_honest(node, one):
                raise Apart(f"{node.name}.{name} may answer as it likes")
            is_method = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not is_dunder(name)
            if is_method and any(hasattr(kind, name) for kind in values) and not self.is_named(node.name):
                raise Apart(f"{node.name}.{name} stands for a method of a value")

    def _named(self, node):
        meaning = self.meaning(node)
        return meaning[1] if meaning else ""

    def _base(self, node, base):
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Call) and self._named(base.func) in ("namedtuple", "NamedTuple"):
            return
        if isinstance(base, ast.Name) and base.id in self.classes and self.bound.get(base.id) == 1:
            return
        if isinstance(base, ast.Name) and self._is_named_tuple(base.id):
            return
        meaning = self.meaning(base)
        if meaning is None:
            raise Apart(f"{node.name} is made of {ast.unparse(base)}")
        module, name = meaning
        kind = getattr(tables.builtins, name, None) if module == "builtins" else None
        if isinstance(kind, type):
            if issubclass(kind, BaseException) and not issubclass(kind, Exception):
                raise Apart(f"{node.name} is made of {name}")
            if kind is not type and (kind in tables.VALUES or kind is object or issubclass(kind, Exception)):
                return
        elif name in tables.BASES or module == "collections.abc" or (module == "typing" and self._is_abstract(name)) or (module in ("json", "queue", "asyncio", "sqlite3", "configparser") and name.endswith(
            ("Error", "Empty", "Full")
        )):
            return
        raise Apart(f"{node.name} is made of {name}")

    @staticmethod
    def _is_abstract(name):
        return name in (tables.names_of("collections.abc") or ()) or name in ("List", "Dict", "Set", "Tuple")

    def _is_named_tuple(self, name):
        """Whether a name is bound once, to a named tuple."""
        found = [
            one
            for one in self.nodes
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
            and any(isinstance(target, ast.Name) and target.id == name for target in one.targets)
        ]  # fmt: skip
        return (
            len(found) == 1 and self.bound.get(name) == 1
            and self._named(found[0].value.func) in ("namedtuple", "NamedTuple")
        )  # fmt: skip

    def _family(self, node, seen=()):
        """The names of all bases of a class, as far as the program shows them."""
        found = set()
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            if isinstance(base, ast.Call) or (isinstance(base, ast.Name) and self._is_named_tuple(name)):
                name = "NamedTuple"
            elif isinstance(base, ast.Name) and name in self.imported:
                name = self.imported[name][1]
            found.add(name)
            if name in self.classes and name not in seen and isinstance(base, ast.Name):
                found |= self._family(self.classes[name], (*seen, name))
        return found

    @staticmethod
    def _value_kind(name):
        if name in tables.VALUE_BASES or name in ("List", "Dict", "Set", "Tuple"):
            import collections

            lowered = {"NamedTuple": tuple, "List": list, "Dict": dict, "Set": set, "Tuple": tuple}
            return lowered.get(name) or getattr(collections, name)
        kind = getattr(tables.builtins, name, None)
        is_value = isinstance(kind, type) and kind in tables.VALUES and not issubclass(kind, BaseException)
        return kind if is_value else None

    # ------------------------------------------------------------------------------------------- __eq__ and its kin

    def _is_honest(self, owner, method):
        """Whether a method decides about objects of the program's own classes only.

        With any other value it returns NotImplemented or False, raises, or reads an attribute that no value has; or it
        calculates, and what it makes is an object of its class that turns into no number.
        """
        names = [one.arg for one in method.args.args]
        extra = (method.args.vararg, method.args.kwarg, *method.args.kwonlyargs, *method.args.defaults)
        if len(names) != 2 or any(extra) or method.args.posonlyargs or method.decorator_list:
            return False
        this, other = names
        assigned = {name for part in method.body for one in ast.walk(part) for name in bindings(one)}
        if {"isinstance", "type", "NotImplemented"} & self.bound.keys() or any(
            isinstance(one, ast.Name) and one.id in names and not isinstance(one.ctx, ast.Load)
            for one in ast.walk(method)
        ):
            return False
        nested = (
            ast.FunctionDef,
            ast.Lambda,
            ast.ClassDef,
            ast.Global,
            ast.Nonlocal,
            ast.Yield,
            ast.YieldFrom,
            ast.Try,
        )
        if any(isinstance(one, nested) for one in ast.walk(method) if one is not method) or assigned & set(names):
            return False
        body = [one for one in method.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
        if not body:
            return False
        form = Form(self, this, other, method.name)
        if method.name == "__contains__" and len(body) == 1:
            return form.looks_into(body[0])
        return form.is_guarded(body) or form.reads_own(body[0]) or form.makes_own(owner, body)

    def is_own_class(self, node, this):
        """Whether an expression is a class of the program that cannot stand for values, or the object's own class."""
        if isinstance(node, ast.Tuple):
            return bool(node.elts) and all(self.is_own_class(one, this) for one in node.elts)
        if _is_class_of(node, this):
            return True
        if not isinstance(node, ast.Name) or self.bound.get(node.id) != 1 or node.id not in self.classes:
            return False
        kind = self.classes[node.id]
        family = self._family(kind)
        decorators = {self._named(one.func if isinstance(one, ast.Call) else one) for one in kind.decorator_list}
        return (
            kind in self.top
            and decorators <= {"dataclass", "total_ordering", "final", "unique"}
            and "Protocol" not in family
            and ("register" not in self.attributes or not any(self._is_registry(name) for name in family))
            and not any(one.arg == "metaclass" and "register" in self.attributes for one in kind.keywords)
        )

    def _is_registry(self, name):
        return name == "ABC" or self._is_abstract(name)


class Form:
    """Forms of a method that knows another object.

    Args:
        reader: of the program.
        this: name of the object's parameter.
        other: of the other one's.
        method: its name.
    """

    def __init__(self, reader, this, other, method):
        self.reader, self.this, self.other, self.method = reader, this, other, method

    def asks_class(self, node):
        """True if an expression holds for objects of own classes only, False if for all others, None if neither."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            asked = self.asks_class(node.operand)
            return None if asked is None else not asked
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            is_other = len(node.args) == 2 and self._is_other(node.args[0])
            return True if is_other and self.reader.is_own_class(node.args[1], self.this) else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = (node.left, node.comparators[0])
            for one, two in (sides, sides[::-1]):
                if _is_class_of(one, self.other) and self.reader.is_own_class(two, self.this):
                    return {ast.Is: True, ast.Eq: True, ast.IsNot: False, ast.NotEq: False}.get(type(node.ops[0]))
        return None

    def _is_other(self, node):
        return isinstance(node, ast.Name) and node.id == self.other

    def refuses(self, body):
        """Whether statements return what is no verdict for another object, or raise."""
        if len(body) != 1:
            return False
        return isinstance(body[0], ast.Raise) or (isinstance(body[0], ast.Return) and self._is_refusal(body[0].value))

    def _is_refusal(self, value):
        if isinstance(value, ast.Name):
            return value.id == "NotImplemented"
        verdict = {"__eq__": False, "__contains__": False, "__ne__": True}.get(self.method)
        return verdict is not None and isinstance(value, ast.Constant) and value.value is verdict

    def is_guarded(self, body):
        """Whether the first statement sends all other objects away."""
        first, rest = body[0], body[1:]
        if isinstance(first, ast.If):
            asked = self.asks_class(first.test)
            if asked is False:
                return self.refuses(first.body)
            return asked is True and self.refuses([*first.orelse, *rest])
        if not isinstance(first, ast.Return) or rest:
            return False
        value = first.value
        if isinstance(value, ast.BoolOp):
            asked = self.asks_class(value.values[0])
            if isinstance(value.op, ast.And):  # False for all others
                return asked is True and self.method in ("__eq__", "__contains__")
            return asked is False and self.method == "__ne__"
        if isinstance(value, ast.IfExp):
            asked = self.asks_class(value.test)
            other = {True: value.orelse, False: value.body}.get(asked)
            return asked is not None and self._is_refusal(other)
        return False

    def reads_own(self, first):
        """Whether the first statement reads, whatever happens, an attribute of the other that no value has."""
        value = getattr(first, "value", None) if isinstance(first, ast.Return | ast.Assign) else None
        if value is None:
            return False
        waiting = [value]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.BoolOp):
                waiting.append(node.values[0])
            elif isinstance(node, ast.Compare):
                waiting += [node.left, node.comparators[0]]
            elif isinstance(node, ast.IfExp):
                waiting.append(node.test)
            elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                continue
            elif isinstance(node, ast.Attribute) and self._is_other(node.value):
                if node.attr not in tables.attributes_of_values() and not is_dunder(node.attr):
                    return True
            else:
                waiting += ast.iter_child_nodes(node)
        return False

    def makes_own(self, owner, body):
        """Whether arithmetic makes objects of its own class, which is near to no number."""
        if self.method not in tables.ARITHMETIC:
            return False
        returned = [one.value for part in body for one in ast.walk(part) if isinstance(one, ast.Return)]
        if not returned or not all(self._is_made_here(owner, one) for one in returned):
            return False
        methods = {one.name for kind in self.reader.classes.values() for one in kind.body if hasattr(one, "name")}
        return self.method in tables.SCALING or not methods & tables.TO_NUMBER

    def _is_made_here(self, owner, value):
        if isinstance(value, ast.Name):
            return value.id in ("NotImplemented", self.this)
        if not isinstance(value, ast.Call):
            return False
        is_named = isinstance(value.func, ast.Name) and value.func.id == owner.name
        return (is_named and self.reader.is_own_class(value.func, self.this)) or _is_class_of(value.func, self.this)

    def looks_into(self, statement):
        """``return x in self.items``."""
        value = statement.value if isinstance(statement, ast.Return) else None
        if not (isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.ops[0], ast.In)):
            return False
        inner = [one.id for one in ast.walk(value.comparators[0]) if isinstance(one, ast.Name)]
        return self._is_other(value.left) and self.other not in inner


def is_dunder(name):
    """Whether a name belongs to Python."""
    return name.startswith("__") and name.endswith("__")


def _is_super(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_class_of(node, name):
    """``type(name)`` or ``name.__class__``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and isinstance(node.value, ast.Name) and node.value.id == name
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"):
        return False
    return len(node.args) == 1 and isinstance(node.args[0], ast.Name) and node.args[0].id == name


def _is_plain_format(node):
    """Whether a format is of a text that reads no attribute of Python's own."""
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) and "__" not in node.value.value


def _is_main(statement):
    """Whether a statement of the module is for a program that is run: ``if __name__ == "__main__":``."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )
