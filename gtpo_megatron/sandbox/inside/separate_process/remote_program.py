"""A program in a process of its own, as its tests see it at the other end of a :mod:`.channel`.

The process of the tests has its own Python: no name, module or object of it is the program's, so that nothing which the
program changes changes a test. Runs inside the sandbox; needs the standard library only.
"""

import builtins
import sys
import types

from gtpo_megatron.sandbox.inside.separate_process.channel import ObjectChannel
from gtpo_megatron.sandbox.inside.separate_process.named_classes import names_used
from gtpo_megatron.sandbox.inside.separate_process.proxies import RemoteClass
from gtpo_megatron.sandbox.inside.separate_process.values import EndedError
from gtpo_megatron.sandbox.inside.testing.names import TestedProgram
from gtpo_megatron.sandbox.inside.testing.runner import TestRunner


class RemoteProgram(TestedProgram):
    """A program in another process.

    Args:
        channel: the channel to its process.
        imports: see the base.
        supplied: likewise.
        used_names: see :func:`.named_classes.names_used`.
        classes: likewise.
    """

    counts_tests = True

    def __init__(self, channel, imports, supplied, used_names, classes):
        self.channel = channel
        super().__init__(imports, supplied, vars(builtins))
        self.used_names, self.classes = used_names, classes
        self.functions = set()
        self.module = RemoteModule(self)
        input_here = builtins.input
        channel.served = {
            "input": lambda _, prompt: (builtins.input if builtins.input is not input_here else read_line)(prompt),
            "read": lambda _: sys.stdin.readline(),
        }

    @property
    def used(self):
        """Number of requests so far."""
        return self.channel.num_asked

    @property
    def has_ended(self):
        """Whether its process has ended, or does not answer as it should."""
        return self.channel.has_ended

    def wait_until_loaded(self):
        """Waits for the program; "" once it is loaded, else why it is not."""
        while "op" in (message := self.channel.receive()):
            self.channel.serve(message)
        if "unloaded" in message:
            return str(message["unloaded"]) or "it does not load"
        self.names = {str(name) for name in message["loaded"]}
        return ""

    def named(self, name):
        """Its value of a name; a class that the tests use as one is marked as named.

        What they use as a function is none, be it a class, and be it known to them by another name as well.
        """
        value = self.channel.ask("global", name=name)
        if isinstance(value, RemoteClass) and name in self.used_names:
            if name not in self.classes:
                self.functions.add(value._key)
                self.channel.named.discard(value._key)
            elif value._key not in self.functions:
                self.channel.named.add(value._key)
        return value

    def is_theirs(self, error):
        """Whether the tests raised an exception themselves."""
        return id(error) not in self.channel.raised_there


class RemoteModule(types.ModuleType):
    """The program, as its tests import it."""

    def __init__(self, program):
        super().__init__("solution")
        vars(self)["_program"] = program

    def __getattr__(self, name):
        program = vars(self)["_program"]
        if name == "__all__":
            return program.given([one for one in program.names if not one.startswith("_")])
        if name in program.imports:
            return program.imported(name)
        if name.startswith("__") or name not in program.names:
            raise AttributeError(f"the program has no {name}")
        return program.named(name)

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            vars(self)["_program"].channel.ask("set_global", name=name, args=(value,))

    def __delattr__(self, name):
        vars(self)["_program"].channel.ask("delete_global", name=name)


def read_line(prompt):
    """A line of the tests' standard input."""
    sys.stdout.write(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.rstrip("\n")


def run_tests(cases, reading, writing, *, imports, supplied, report, session):
    """Runs the tests of all cases on the program at the other end.

    Args:
        cases: see :meth:`.runner.TestRunner.run`.
        reading: descriptor.
        writing: descriptor.
        imports: see :class:`.names.TestedProgram`.
        supplied: likewise.
        report: see :class:`.runner.TestRunner`.
        session: likewise.
    """
    channel = ObjectChannel(reading, writing, is_tests_side=True)
    program = RemoteProgram(channel, imports, supplied, *names_used(cases))
    try:
        failure = program.wait_until_loaded()
    except EndedError:
        failure = "the program ended while it was loaded"
    if failure:
        report({"unloaded": failure})
        return
    TestRunner(program, report, session).run(cases)
