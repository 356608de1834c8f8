"""The program's side of two processes: loads it, and does what its tests ask for by a :mod:`.channel`.

Runs inside the sandbox; needs the standard library only.
"""

import builtins
import contextlib
import io
import os
import sys
import types

from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.program import fresh_main, prepare
from gtpo_megatron.sandbox.inside.separate_process.channel import ObjectChannel
from gtpo_megatron.sandbox.inside.separate_process.values import EndedError
from gtpo_megatron.sandbox.inside.tracebacks import one_line

KEPT_BYTES = 1 << 20
"""Printed bytes that wait for the next message; what exceeds them is written at once."""


def serve(codes, supplied, reading, writing):
    """Loads a program, and does what its tests ask for until they end.

    Args:
        codes: see :func:`.program.compiled`.
        supplied: names of its prelude.
        reading: descriptor.
        writing: descriptor.
    """
    fresh_main()
    prepare()
    channel = ObjectChannel(reading, writing, is_tests_side=False)
    printed = {"stdout": Printed(1), "stderr": Printed(2)}
    channel.printed = lambda: {name: text for name, one in printed.items() if (text := one.taken())}
    vars(builtins).update(supplied)
    for name, stream in printed.items():
        setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", errors="replace", write_through=True))
    sys.stdin = own = io.TextIOWrapper(io.BufferedReader(Input(channel)), encoding="utf-8", errors="replace")
    sys.argv = ["program.py"]
    if "getrecursionlimit" in supplied:  # all of sys, whose streams are this process's own
        vars(builtins).update({name: getattr(sys, name) for name in prelude.STREAMS})
    input_here = builtins.input
    builtins.input = lambda prompt="": (
        channel.ask("input", args=(str(prompt),)) if sys.stdin is own else input_here(prompt)
    )
    module = types.ModuleType("program")
    for name in ("program", "solution"):
        sys.modules[name] = module

    def found(name):
        if name in vars(module):
            return vars(module)[name]
        if name in prelude.NODES and name in supplied:
            return supplied[name]
        raise NameError(f"name {name!r} is not defined")

    channel.served = {
        "global": found,
        "set_global": lambda name, value: setattr(module, name, value),
        "delete_global": lambda name: delattr(module, name),
    }
    try:
        for one in codes:
            exec(one, vars(module))
    except BaseException as error:
        channel.send({"unloaded": one_line(error)})
        os._exit(0)
    channel.send({"loaded": [name for name in vars(module) if not name.startswith("__")]})
    with contextlib.suppress(EndedError):
        while True:
            channel.serve(channel.receive())
    os._exit(0)


class Printed(io.RawIOBase):
    """Collects what a program prints, until the next message takes it along.

    Args:
        descriptor: descriptor of the process's own output, which takes what is much.
    """

    def __init__(self, descriptor):
        super().__init__()
        self.descriptor, self.parts, self.size = descriptor, [], 0

    def writable(self):
        """It is."""
        return True

    def write(self, data):
        """Keeps text, or writes it to the process's own output if it is much."""
        data = bytes(data)
        if self.size + len(data) > KEPT_BYTES:
            os.write(self.descriptor, data)
            return len(data)
        self.parts.append(data)
        self.size += len(data)
        return len(data)

    def taken(self):
        """The text so far."""
        text = b"".join(self.parts).decode("utf-8", "replace")
        self.parts, self.size = [], 0
        return text


class Input(io.RawIOBase):
    """The tests' standard input."""

    def __init__(self, channel):
        super().__init__()
        self.channel, self.left = channel, b""

    def readable(self):
        """It is."""
        return True

    def readinto(self, buffer):
        """A part of a line."""
        if not self.left:
            self.left = str(self.channel.ask("read")).encode("utf-8", "surrogatepass")
        part, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
