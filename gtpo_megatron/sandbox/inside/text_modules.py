"""Modules that are imported from texts: those of this folder in a bare Python, and those that a row brings along.

This one is given to the bare Python as text itself; it needs the standard library only.
"""

import importlib
import importlib.util
import json
import os
import sys


class TextFinder:
    """Finds modules by their texts.

    Args:
        texts: texts of the modules, by dotted name.
        place: text that stands behind a module's name in the name of its file.
    """

    def __init__(self, texts, place=""):
        self.texts, self.place = texts, place
        self.packages = {name.rpartition(".")[0] for name in texts}

    def find_spec(self, name, _path=None, _target=None):
        """The specification of a module, if its text is there."""
        if name not in self.texts:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=name in self.packages)

    def create_module(self, _spec):
        """Leaves that to Python."""

    def exec_module(self, module):
        """Executes the text."""
        file = f"{module.__name__}.py{self.place}"
        exec(compile(self.texts[module.__name__], file, "exec", dont_inherit=True), vars(module))


def offer(texts):
    """Makes modules of a row importable, behind all others."""
    if texts:
        sys.meta_path.append(TextFinder(texts))


def start(texts, name, given):
    """Makes the modules of the sandbox importable, and runs ``main`` of one.

    Args:
        texts: texts of the modules, by dotted name.
        name: dotted name of the module to run.
        given: argument of its ``main``.
    """
    sys.meta_path.insert(0, TextFinder(texts, " of the sandbox"))
    importlib.import_module(name).main(given)


def start_server():
    """Runs the server, whose modules and settings are the first that comes by standard input."""
    settings = json.loads(read_exactly(0, int.from_bytes(read_exactly(0, 8), "big")))
    start(settings.pop("modules"), settings.pop("start"), settings)


def read_exactly(descriptor, size):
    """So many bytes, in one place of the memory; none at the end of the file."""
    found = bytearray(size)
    view = memoryview(found)
    while view and (count := os.readv(descriptor, [view])):
        view = view[count:]
    return found if not view else bytearray()
