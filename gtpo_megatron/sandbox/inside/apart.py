"""A program in a process of its own, as its tests see it at the other end of a :mod:`.link`.

The process of the tests has its own Python: no name, module or object of it is the program's, so that nothing which the
program changes changes a test. Runs inside the sandbox; needs the standard library only.
"""

import builtins
import importlib
import sys
import types

from gtpo_megatron.sandbox.inside.link import Link
from gtpo_megatron.sandbox.inside.remotes import Mirror
from gtpo_megatron.sandbox.inside.test_runner import Tests, read_line
from gtpo_megatron.sandbox.inside.values import EndedError


class RemoteProgram:
    """A program in another process.

    Args:
        link: to it.
        imports: what its text imports at its top: module and name by the name that it has there.
        supplied: names of the prelude that tests may use.
    """

    counts_tests = True

    def __init__(self, link, imports, supplied):
        self.link, self.imports, self.supplied = link, imports, supplied
        self.names, self.words, self.hidden = set(), set(), set()
        self.module = ProgramModule(self)
        input_here = builtins.input
        link.served = {
            "input": lambda _, prompt: (builtins.input if builtins.input is not input_here else read_line)(prompt),
            "read": lambda _: sys.stdin.readline(),
        }

    @property
    def used(self):
        """How often anything was asked of it."""
        return self.link.num_asked

    @property
    def has_ended(self):
        """Whether its process has ended, or does not answer as it should."""
        return self.link.has_ended

    def wait_until_loaded(self):
        """Waits for the program; "" once it is loaded, else why it is not."""
        while "op" in (message := self.link.receive()):
            self.link.serve(message)
        if "unloaded" in message:
            return str(message["unloaded"]) or "it does not load"
        self.names = {str(name) for name in message["loaded"]}
        return ""

    def named(self, name):
        """Its value of a name; a class that does not only hold functions is marked as named."""
        value = self.link.ask("global", name=name)
        if isinstance(value, Mirror) and name in self.words - {"Solution"}:
            self.link.named.add(value._key)
        return value

    def imported(self, name):
        """What it imports under a name, which is looked up here."""
        module, attribute = self.imports[name]
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    def is_theirs(self, error):
        """Whether the tests raised an exception themselves."""
        return id(error) not in self.link.raised_there

    def hides(self, names, own):
        """Says which names ``from solution import *`` does not give to these tests."""
        self.hidden = {*vars(builtins), *self.supplied, *names} - set(own)


class ProgramModule(types.ModuleType):
    """The program, as its tests import it."""

    def __init__(self, program):
        super().__init__("solution")
        vars(self)["_program"] = program

    def __getattr__(self, name):
        program = vars(self)["_program"]
        if name == "__all__":
            return [one for one in program.names if not one.startswith("_") and one not in program.hidden]
        if name in program.imports:
            return program.imported(name)
        if name.startswith("__") or name not in program.names:
            raise AttributeError(f"the program has no {name}")
        return program.named(name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            vars(self)["_program"].link.ask("set_global", name=name, args=(value,))

    def __delattr__(self, name):
        vars(self)["_program"].link.ask("delete_global", name=name)


def examine(cases, reading, writing, *, imports, supplied, report, session):
    """Runs the tests of all cases on the program at the other end.

    Args:
        cases: see :class:`.test_runner.Tests`.
        reading: descriptor.
        writing: descriptor.
        imports: see :class:`RemoteProgram`.
        supplied: likewise.
        report: see :class:`.test_runner.Tests`.
        session: likewise.
    """
    program = RemoteProgram(Link(reading, writing, is_guarded=True), imports, supplied)
    try:
        said = program.wait_until_loaded()
    except EndedError:
        said = "the program ended while it was loaded"
    if said:
        report({"unloaded": said})
        return
    Tests(program, supplied, vars(builtins), report, session).run(cases)
