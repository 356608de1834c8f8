"""Which names of a program are its own variables, and which may be Python's or supplied ones.

Runs inside the sandbox; needs the standard library only.
"""

import ast

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Scopes:
    """The names that functions, comprehensions and the module bind.

    Args:
        nodes: nodes of a program.
        parents: parent of each node.
    """

    def __init__(self, nodes, parents):
        self.parents = parents
        self.of_functions, self.of_module = {}, set()
        declared = {}
        for node in nodes:
            if isinstance(node, ast.Global):
                declared.setdefault(self._function_of(node), set()).update(node.names)
        for node in nodes:
            for name in bindings(node):
                scope = self._scope_of_binding(node)
                if scope is None or name in declared.get(scope, ()):
                    self.of_module.add(name)
                elif not isinstance(scope, ast.ClassDef):
                    self.of_functions.setdefault(scope, set()).add(name)

    def is_global(self, node):
        """Whether a name is looked up in the module, and then among Python's own, when it is used."""
        child, at, outside = node, self.parents.get(node), None
        while at is not None:
            if at is not outside and node.id in self.of_functions.get(at, ()) and self._is_inside(at, child):
                return False
            if isinstance(at, ast.comprehension) and child is at.iter and self.parents[at].generators[0] is at:
                outside = self.parents[at]  # the first iterable is looked up outside
            child, at = at, self.parents.get(at)
        return True

    def is_supplied(self, node):
        """Whether no scope of the program binds a name where it is used."""
        return node.id not in self.of_module and self.is_global(node)

    @staticmethod
    def _is_inside(scope, child):
        """Whether a part of a function or a comprehension sees the names that it binds."""
        if isinstance(scope, ast.Lambda):
            return child is scope.body
        return not isinstance(scope, FUNCTIONS) or child in scope.body

    def _scope_of_binding(self, node):
        """The function, comprehension or class in which a node binds a name; None for the module."""
        child, at = node, self.parents.get(node)
        if isinstance(node, ast.arg):
            while not isinstance(at, FUNCTIONS):
                at = self.parents[at]
            return at
        is_walrus = isinstance(at, ast.NamedExpr) and at.target is node
        while at is not None:
            if isinstance(at, COMPREHENSIONS) and not is_walrus:
                return at
            if isinstance(at, ast.ClassDef) and child in at.body:
                return at
            if isinstance(at, FUNCTIONS) and self._is_inside(at, child):
                return at
            child, at = at, self.parents.get(at)
        return None

    def is_in_function(self, node):
        """Whether a node is evaluated by a call."""
        return self._function_of(node) is not None

    def _function_of(self, node):
        at = self.parents.get(node)
        while at is not None and not isinstance(at, FUNCTIONS):
            at = self.parents.get(at)
        return at


def bindings(node: ast.AST) -> list[str]:
    """The names that a node binds itself."""
    if isinstance(node, ast.Name):
        return [node.id] if not isinstance(node.ctx, ast.Load) else []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    if isinstance(node, ast.Global | ast.Nonlocal):
        return list(node.names)
    return [getattr(node, "name")] if type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple") else []  # noqa: B009
