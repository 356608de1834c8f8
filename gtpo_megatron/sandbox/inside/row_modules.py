"""Modules that a row brings along, for its tests and for its program; each is executed where it is imported.

Runs inside the sandbox; needs the standard library only.
"""

import importlib.util
import sys


class Finder:
    """Finds modules by their texts.

    Args:
        texts: by name.
    """

    def __init__(self, texts):
        self.texts = texts

    def find_spec(self, name, _path=None, _target=None):
        """The specification of a module of the row."""
        return importlib.util.spec_from_loader(name, self) if name in self.texts else None

    def create_module(self, _spec):
        """Leaves that to Python."""

    def exec_module(self, module):
        """Executes the text."""
        exec(compile(self.texts[module.__name__], f"{module.__name__}.py", "exec", dont_inherit=True), vars(module))


def offer(texts):
    """Makes modules importable."""
    if texts:
        sys.meta_path.append(Finder(texts))
