"""Why a program must not share the process of its tests, as its text shows; one with no such reason may.

A program that may uses modules, names and attributes of known lists (:mod:`.allowlist`), so that its text shows all
that it does: it reaches no frame, no code, no module's insides and no other object's class, it ends nothing, and no
object of it knows what it is compared with (:mod:`.classes`, :mod:`.comparisons`). What cannot be seen in the text is a
reason. Runs inside the sandbox; needs the standard library only.
"""

import ast
import re

from gtpo_megatron.sandbox.inside.special_methods import is_dunder
from gtpo_megatron.sandbox.inside.static_check import allowlist
from gtpo_megatron.sandbox.inside.static_check.allowlist import NotAllowed
from gtpo_megatron.sandbox.inside.static_check.classes import Classes
from gtpo_megatron.sandbox.inside.static_check.meanings import Meanings
from gtpo_megatron.sandbox.inside.static_check.scopes import bindings


class Checked:
    """What is found in a program.

    Attributes:
        reason: the first one for a process of its own, with its line; "" if there is none.
        imports: see :func:`imports_at_top`.
        own_names: names that its module binds.
    """

    def __init__(self, reason, imports=None, own_names=frozenset()):
        self.reason, self.imports, self.own_names = reason, imports or {}, own_names


def checked(texts, is_named, origins):
    """Checks the texts of a program.

    Args:
        texts: texts of the program, in order; they are known to compile.
        is_named: tells whether the tests may name something.
        origins: names that are supplied without an import: module and name ("" for the module) of each, or None if they
            are no module's.
    """
    try:
        trees = [ast.parse(text) for text in texts]
        program = ProgramCheck(trees, is_named, origins)
        return Checked(program.reason(), imports_at_top(trees), program.names.scopes.of_module)
    except RecursionError:
        return Checked("it is nested too deeply")


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


class ProgramCheck:
    """Looks at every node of a program.

    Args:
        trees: trees of the texts.
        is_named: see :func:`checked`.
        origins: likewise.
    """

    def __init__(self, trees, is_named, origins):
        statements = [one for tree in trees for one in tree.body if not _is_main(one)]
        self.names = Meanings(statements, origins)
        self.annotations = set(self._annotations())
        self.is_dispatching = self._dispatches()
        self.classes = Classes(self.names, statements, is_named)

    def reason(self):
        """The first reason for a process of its own; "" if there is none."""
        for node in self.names.nodes:
            try:
                self._look_at(node)
            except NotAllowed as reason:
                return f"{reason} (line {getattr(node, 'lineno', 0)})"
        return ""

    def _annotations(self):
        for node in self.names.nodes:
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if isinstance(part, ast.AST):
                    yield from ast.walk(part)

    def _look_at(self, node):
        """Raises NotAllowed for what a node does that is not to be seen, or not allowed."""
        for name in bindings(node):
            if is_dunder(name) and name not in allowlist.ASSIGNED and not self.classes.is_method(node, name):
                raise NotAllowed(f"it defines {name}")
        look = {
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.keyword: self._keyword,
            ast.ClassDef: self.classes.look_at,
            ast.Constant: self._constant,
            ast.MatchClass: self._pattern,
        }.get(type(node))
        if look is not None:
            look(node)

    def _import(self, node):
        for alias in node.names:
            if allowlist.names_of(alias.name) is None:
                raise NotAllowed(f"it imports {alias.name}")

    def _import_from(self, node):
        allowed = allowlist.names_of(node.module or "") if not node.level else None
        for alias in node.names:
            is_star = alias.name == "*" and node.module in allowlist.STARRED
            if not is_star and (allowed is None or alias.name not in allowed):
                raise NotAllowed(f"it imports {alias.name} of {node.module}")

    def _name(self, node):
        name, parent = node.id, self.names.parents.get(node)
        if not isinstance(node.ctx, ast.Load):
            return
        self._check_dispatched(node)
        if is_dunder(name) and name not in allowlist.READABLE and not self.classes.is_renamed(node):
            raise NotAllowed(f"it uses {name}")
        if name in allowlist.NEVER and self.names.scopes.is_global(node):
            raise NotAllowed(f"it uses {name}")
        if self.names.module_of(node):
            if not (isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)):
                raise NotAllowed(f"it uses the module {name} as a value")
            return
        meaning = self.names.meaning(node)
        if meaning == ("builtins", name):
            self._builtin(node, name)
        elif meaning:
            self._of_module(node, *meaning)

    def _builtin(self, node, name):
        if name in (*allowlist.BY_NAME, "super", "vars") and not self.names.called_by(node):
            raise NotAllowed(f"it uses {name} as a value")
        is_asked = self.names.called_by(node) or self._is_compared(node)
        if name == "type" and not is_asked:
            raise NotAllowed("it uses type as a value")

    def _of_module(self, node, module, name):
        """What is used of a module: one of its public names, and some in one form only."""
        if name not in (allowlist.names_of(module) or ()):
            raise NotAllowed(f"it uses {module}.{name}")
        if name in allowlist.ENUMS and not self._is_class_use(node):
            raise NotAllowed(f"it uses {name} otherwise than as a base")
        if name == "seed" and self.names.scopes.is_in_function(node):
            raise NotAllowed("it seeds what its tests draw from")
        parent = self.names.parents.get(node)
        if name in allowlist.METACLASSES:
            if not (isinstance(parent, ast.keyword) and parent.arg == "metaclass" and name == "ABCMeta"):
                raise NotAllowed(f"it uses {name} as a value")
        elif name in allowlist.CALLED_ONLY:
            self._check_called(self.names.called_by(node), name)

    def _check_called(self, call, name):
        """``wraps(f)`` as a decorator, ``attrgetter("x")``, ``SimpleNamespace(x=1)``: what they do is to be seen."""
        if call is None or any(isinstance(one, ast.Starred) for one in call.args):
            raise NotAllowed(f"it uses {name} as a value")
        if name == "wraps" and (len(call.args) != 1 or call.keywords or not self._decorates(call)):
            raise NotAllowed("it calls wraps otherwise than to decorate a function")
        if name == "SimpleNamespace" and any(one.arg is None for one in call.keywords):
            raise NotAllowed("it makes the names of a SimpleNamespace")
        if name in ("attrgetter", "methodcaller"):
            for at in range(len(call.args) if name == "attrgetter" else 1):
                self._check_name_given(call, at, is_set=False)

    def _decorates(self, call):
        """Whether a call is the decorator of a function."""
        owner = self.names.parents.get(call)
        return isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef) and call in owner.decorator_list

    def _is_class_use(self, node):
        """Whether a class is used as a base, in an annotation or asked for by isinstance."""
        parent = self.names.parents.get(node)
        is_base = isinstance(parent, ast.ClassDef) and node in parent.bases
        return is_base or self._is_asked_for(node)

    def _is_asked_for(self, node):
        parent = self.names.parents.get(node)
        if isinstance(parent, ast.Tuple):
            node, parent = parent, self.names.parents.get(parent)
        is_asking = isinstance(parent, ast.Call) and self.names.is_python(parent.func, "isinstance", "issubclass")
        return is_asking and node in parent.args[1:]

    def _is_compared(self, node):
        return isinstance(self.names.parents.get(node), ast.Compare) or self._is_asked_for(node)

    # ------------------------------------------------------------------------------------------------------ attributes

    def _attribute(self, node):
        name, module = node.attr, self.names.module_of(node.value)
        if not isinstance(node.ctx, ast.Load):
            self._check_store(node, module)
        if module:
            self._attribute_of_module(node, module)
        elif name == "format":
            self._check_format(node)
        elif name == "__dict__" and isinstance(node.ctx, ast.Load):
            return  # of its own objects, which is looked at when it runs
        elif name == "__class__":
            self._check_class_use(node)
        elif is_dunder(name) and (_is_super(node.value) or self.names.is_python(node.value, "object")):
            self._check_inherited(node, name)
        else:
            self.check_attribute(name)

    def _check_store(self, node, module):
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if module or (isinstance(root, ast.Name) and (root.id in self.names.modules or root.id in self.names.imported)):
            raise NotAllowed(f"it changes {ast.unparse(node)}")
        self.check_attribute(node.attr, is_set=True)

    def _check_format(self, node):
        """``"...".format`` of a text that can be seen, whose fields read no attribute that a program may not."""
        text = node.value.value if isinstance(node.value, ast.Constant) else None
        if not isinstance(text, str) or self.names.called_by(node) is None:
            raise NotAllowed("it calls format of a text that cannot be seen")
        for part in re.findall(r"[.\[]\s*(\w+)", text):
            if part.startswith("_"):
                raise NotAllowed(f"a format of it reads {part}")
            self.check_attribute(part)

    def _attribute_of_module(self, node, module):
        parent = self.names.parents.get(node)
        if not self.names.module_of(node):
            self._of_module(node, module, node.attr)
        elif not (isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)):
            raise NotAllowed(f"it uses the module {ast.unparse(node)} as a value")

    def _check_inherited(self, node, name):
        """``super().__init__()``, ``object.__setattr__(self, "x", value)`` with a name that can be seen."""
        call = self.names.called_by(node)
        if call is None or name not in allowlist.INHERITED:
            raise NotAllowed(f"it uses {ast.unparse(node)}")
        if name in ("__setattr__", "__delattr__"):
            self._check_name_given(call, 0 if _is_super(node.value) else 1, is_set=True)

    def check_attribute(self, name, *, is_set=False):
        """Raises NotAllowed for an attribute that is not to be read, or set."""
        if (is_dunder(name) and name not in allowlist.DUNDERS_READ) or name in allowlist.INSIDES:
            raise NotAllowed(f"it uses the attribute {name}")
        if is_set and (is_dunder(name) or name in allowlist.CHECKS or name in self.classes.of_values):
            raise NotAllowed(f"it sets {name}")
        if name == "register" and self.classes.may_register():
            raise NotAllowed("it may register what is an instance of what")

    def _check_name_given(self, call, at, *, is_set):
        """Raises NotAllowed if an argument is no text that names attributes which may be used."""
        name = call.args[at] if len(call.args) > at else None
        is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
        if not is_text or any(isinstance(one, ast.Starred) for one in call.args[: at + 1]):
            raise NotAllowed("it makes the name of an attribute")
        for part in name.value.split("."):
            if part == "format":
                raise NotAllowed("it calls format by its name")
            if name.value.startswith("_") and not is_set:
                raise NotAllowed("it reads a private attribute by its name")
            self.check_attribute(part, is_set=is_set)

    def _keyword(self, node):
        if node.arg and (is_dunder(node.arg) or node.arg in ("stack_info", "namespace")):
            raise NotAllowed(f"it gives {node.arg}")
        if node.arg == "style" and not (isinstance(node.value, ast.Constant) and node.value.value == "%"):
            raise NotAllowed("it gives a style of formats")

    def _call(self, node):
        if getattr(node.func, "attr", "") in ("parse_args", "parse_known_args") and len(node.args) > 1:
            raise NotAllowed("it parses arguments into an object")
        own = self.classes.by_name.get(getattr(node.func, "id", ""))
        is_one = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if own is not None and not is_one and self.classes.family(own) & set(allowlist.ENUMS):
            raise NotAllowed("it may make a class by a call of an enumeration")
        if self.names.is_python(node.func, *allowlist.BY_NAME):  # what they are given is looked at when it runs
            if any(isinstance(one, ast.Starred) for one in node.args) or node.keywords or len(node.args) < 2:
                raise NotAllowed(f"it calls {node.func.id} with more than can be seen")
        elif self.names.is_python(node.func, "vars"):
            if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
                raise NotAllowed("it asks for the names of where it is")
        elif self.names.is_python(node.func, "type"):
            if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
                raise NotAllowed("it makes a class by type")
            self._check_class_use(node)

    def _check_class_use(self, node):
        """``type(x)`` and ``x.__class__`` are asked for an attribute, compared, printed, or called as the class."""
        parent, call = self.names.parents.get(node), self.names.called_by(node)
        if call is not None:
            is_starred = any(isinstance(one, ast.Starred) for one in call.args)
            if len(call.args) == 3 or is_starred or any(one.arg is None for one in call.keywords):
                raise NotAllowed("it may make a class by a call of a class")
            return
        is_read = isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)
        is_printed = isinstance(parent, ast.Call) and self.names.is_python(
            parent.func, "print", "str", "repr", "hash", "id"
        )
        if not (is_read or is_printed or self._is_compared(node) or isinstance(parent, ast.FormattedValue)):
            raise NotAllowed("it keeps the class of an object")

    # --------------------------------------------------------------------------------------------------------- others

    def _constant(self, node):
        """A text in an annotation, which may be evaluated, is one of names."""
        if not isinstance(node.value, str) or node not in self.annotations:
            return
        try:
            tree = ast.parse(node.value, mode="eval")
        except (SyntaxError, ValueError):
            raise NotAllowed("an annotation of it is no expression") from None
        for one in ast.walk(tree):
            name = getattr(one, "id", getattr(one, "attr", ""))
            if not isinstance(one, allowlist.OF_TYPES) or is_dunder(name) or name in allowlist.NEVER:
                raise NotAllowed("an annotation of it does more than name a type")

    def _check_dispatched(self, node):
        """Annotations are evaluated where functions are chosen by them: they must be classes, not texts by a name."""
        if isinstance(node, ast.Name) and node in self.annotations and self.is_dispatching:
            is_known = node.id in self.classes.by_name or self.names.meaning(node) is not None
            if not is_known:
                raise NotAllowed(f"it dispatches by {node.id}")

    def _dispatches(self):
        return any(name.startswith("singledispatch") for _, name in self.names.imported.values()) or any(
            isinstance(one, ast.Attribute) and one.attr.startswith("singledispatch") for one in self.names.nodes
        )

    def _pattern(self, node):
        for name in node.kwd_attrs:
            if name.startswith("_") or name == "format":
                raise NotAllowed(f"a pattern of it reads {name}")
            self.check_attribute(name)


def _is_super(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_main(statement):
    """Whether a statement of the module is for a program that is run: ``if __name__ == "__main__":``."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )
