"""Which names of a program its tests use, and which of them as classes: only those classes answer for their objects.

Runs inside the sandbox; needs the standard library only.
"""

import ast

from gtpo_megatron.sandbox.inside.testing.names import MODULE_NAMES, is_other


def names_used(cases):
    """Names that tests use outside of their imports, and those of them that may be a program's classes.

    A class has a name that begins with a capital letter, is not ``Solution``, means nothing of Python's, and is not
    only called and compared with values, as functions are.
    """
    loaded, classes, own = set(), set(), set()
    for case in cases:
        own.update(case["own"])
        try:
            tree = ast.parse(case["code"])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        used = Uses(tree)
        loaded |= used.loaded
        classes |= used.as_classes
    return loaded, {name for name in classes - own - {"Solution"} if name[:1].isupper() and "_" not in name}


class Uses:
    """Where a tree uses names that may be a program's.

    Args:
        tree: tree of a text of tests.
    """

    def __init__(self, tree):
        self.loaded, self.as_classes = set(), set()
        self.above = {below: node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
        self.others, self.originals = set(MODULE_NAMES), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.others |= {one.asname or one.name.partition(".")[0] for one in node.names if is_other(one.name)}
            elif isinstance(node, ast.ImportFrom):
                if node.module and not node.level and is_other(node.module):
                    self.others |= {one.asname or one.name for one in node.names}
                else:
                    self.originals |= {one.asname: one.name for one in node.names if one.asname}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.others.add(node.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self.others:
                self.add(self.originals.get(node.id, node.id), node)
            elif isinstance(node, ast.Attribute) and self.root(node) not in self.others:
                self.add(node.attr, node)

    def root(self, node):
        """The name before the dots of an attribute."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def add(self, name, node):
        """Notes a use of a name."""
        self.loaded.add(name)
        if not self.is_of_function(node):
            self.as_classes.add(name)

    def is_of_function(self, node):
        """Whether a use is a call whose result, or a function of it, is compared at once with no object."""
        above = self.above.get(node)
        if not isinstance(above, ast.Call) or above.func is not node:
            return False
        while isinstance(above, ast.Call) and isinstance(outer := self.above.get(above), ast.Call | ast.UnaryOp):
            above = outer
        return isinstance(self.above.get(above), ast.Compare | ast.Assert)
