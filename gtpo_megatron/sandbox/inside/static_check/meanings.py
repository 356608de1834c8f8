"""What the names of a program mean: its own, those of modules that it imports, and those that it has without an import.

Runs inside the sandbox; needs the standard library only.
"""

import ast

from gtpo_megatron.sandbox.inside.static_check import allowlist
from gtpo_megatron.sandbox.inside.static_check.scopes import Scopes, bindings


class Meanings:
    """The nodes of a program, and what expressions in it mean.

    Args:
        statements: statements of the program.
        origins: see :func:`.check.checked`.

    Attributes:
        nodes: all nodes of the statements.
        parents: parent of each node.
        scopes: scopes that bind names.
        modules: dotted names of modules by the names that they have.
        imported: module and name of what is imported of modules, by the name that it has.
        bound: number of times that each name is bound, anywhere.
    """

    def __init__(self, statements, origins):
        self.origins = origins
        self.nodes = [node for statement in statements for node in ast.walk(statement)]
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.scopes = Scopes(self.nodes, self.parents)
        self.modules, self.imported, self.bound = {}, {}, {}
        for node in self.nodes:
            names = bindings(node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._take_import(node)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                names = [*names, *allowlist.starred(node.module)]
            for name in names:
                self.bound[name] = self.bound.get(name, 0) + 1

    def _take_import(self, node):
        for alias in node.names:
            bound = alias.asname or alias.name
            if isinstance(node, ast.Import):
                first = alias.name.partition(".")[0]
                self.modules[alias.asname or first] = alias.name if alias.asname else first
            elif alias.name == "*":
                self.imported |= {name: (node.module, name) for name in allowlist.starred(node.module)}
            elif allowlist.is_listed(place := f"{node.module}.{alias.name}"):
                self.modules[bound] = place
            else:
                self.imported[bound] = (node.module, alias.name)

    def module_of(self, node):
        """The dotted name of the module that an expression is, or ""."""
        if isinstance(node, ast.Name):
            if node.id in self.modules:
                return self.modules[node.id]
            origin = self.origins.get(node.id) if self.scopes.is_supplied(node) else None
            return origin[0] if origin and not origin[1] else ""
        if isinstance(node, ast.Attribute) and (before := self.module_of(node.value)):
            place = f"{before}.{node.attr}"
            return place if allowlist.is_listed(place) else ""
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
        if node.id in allowlist.BUILTINS and (node.id in allowlist.LOOKED_AT or self.scopes.is_supplied(node)):
            return ("builtins", node.id) if self.scopes.is_global(node) else None
        return self.origins.get(node.id) if self.scopes.is_supplied(node) else None

    def named(self, node):
        """The name of what an expression has of a module or of Python, or ""."""
        meaning = self.meaning(node)
        return meaning[1] if meaning else ""

    def is_python(self, node, *names):
        """Whether an expression is one of these names of Python's own."""
        meaning = self.meaning(node)
        return meaning is not None and meaning[0] == "builtins" and meaning[1] in names

    def called_by(self, node):
        """The call of which an expression is the function, or None."""
        parent = self.parents.get(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None
