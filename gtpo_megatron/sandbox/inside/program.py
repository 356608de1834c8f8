"""Runs a program in its own process: executes it, calls it, or offers it to its tests in another process.

Runs inside the sandbox; needs the standard library only.
"""

import atexit  # noqa: F401 - loaded before any fork
import builtins
import contextlib
import gc
import io
import json
import os
import sys
import types

from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.link import Link, last_line
from gtpo_megatron.sandbox.inside.nodes import built, kinds_of
from gtpo_megatron.sandbox.inside.returned import as_exact_json, as_json
from gtpo_megatron.sandbox.inside.values import EndedError

RECURSION_LIMIT = 50_000
"""LiveCodeBench's; what calls through C take of the stack (functions with a cache, generators) is some 30 MiB."""

KEPT_BYTES = 1 << 20
"""Printed bytes that wait for the next message; what exceeds them is written at once."""


def prepare():
    """Lifts the limits of Python's own that a right program may meet: depth of calls, digits of integers."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(0)


def fresh_main():
    """A new module ``__main__`` and new standard streams."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8", errors="replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", errors="replace", write_through=True)
    sys.argv = ["program.py"]
    gc.enable()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def run_as_main(code, supplied):
    """Runs a program as Python does, and leaves."""
    prepare()
    module = fresh_main()
    supply(supplied)
    status = 0
    try:
        for one in code:
            exec(one, vars(module))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        sys.stderr.write(last_line(error))
    try:
        sys.modules["threading"]._shutdown()
        sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        status = status or 1
        sys.stderr.write(last_line(error))
    os._exit(status & 0xFF)


def supply(names):
    """Puts the names of a prelude beneath the program's own."""
    vars(builtins).update(names)
    if "getrecursionlimit" in names:  # all of sys, whose streams are this process's own
        vars(builtins).update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, argv=sys.argv)


def reporter(nonce):
    """A function that reports what became of a case."""

    def report(status, detail="", output=""):
        line = json.dumps({"nonce": nonce, "status": status, "output": output, "detail": detail})
        os.write(3, line.encode("utf-8", "replace") + b"\n")

    return report


def load_and_do(code, cases, report, supplied):
    """Loads a program and reports on each call."""
    prepare()
    module = fresh_main()
    supply(supplied)
    module.__name__ = "program"
    try:
        for one in code:
            exec(one, vars(module))
    except BaseException as error:
        report("unloaded", last_line(error))
        os._exit(1)
    for case in cases:
        try:
            output = called(module, case)
        except BaseException as error:
            report("error", last_line(error))
        else:
            report("ok", output=output)
    os._exit(0)


def called(module, case):
    """What a call returns, as JSON; arguments and result are LeetCode's nodes where the stub or the program says so."""
    function = found(module, case["function"])
    kinds = tuple(case["kinds"]) or kinds_of(function)
    given = json.loads(case["arguments"])
    ways = [*kinds[:-1], *[""] * len(given)]
    value = function(
        *(
            built(one, way, lambda name: getattr(module, name, vars(builtins).get(name)))
            for one, way in zip(given, ways, strict=False)
        )
    )
    return as_exact_json(value) if case["is_exact"] else as_json(value, kinds[-1] if kinds else "")


def found(module, name):
    """A function of the program, or a method of its class Solution."""
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


def offer(code, supplied, reading, writing):
    """Loads a program, and does what its tests ask for until they end."""
    fresh_main()
    prepare()
    link = Link(reading, writing, is_guarded=False)
    printed = {"stdout": Printed(1), "stderr": Printed(2)}
    link.printed = lambda: {name: text for name, one in printed.items() if (text := one.taken())}
    vars(builtins).update(supplied)
    for name, stream in printed.items():
        setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", errors="replace", write_through=True))
    sys.stdin = own = io.TextIOWrapper(io.BufferedReader(Reader(link)), encoding="utf-8", errors="replace")
    sys.argv = ["program.py"]
    if "getrecursionlimit" in supplied:  # all of sys, whose streams are this process's own
        vars(builtins).update({name: getattr(sys, name) for name in prelude.STREAMS})
    input_here = builtins.input
    builtins.input = lambda prompt="": (
        link.ask("input", args=(str(prompt),)) if sys.stdin is own else input_here(prompt)
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

    link.served = {
        "global": found,
        "set_global": lambda name, value: setattr(module, name, value),
        "delete_global": lambda name: delattr(module, name),
    }
    try:
        for one in code:
            exec(one, vars(module))
    except BaseException as error:
        link.send({"unloaded": last_line(error)})
        os._exit(0)
    link.send({"loaded": [name for name in vars(module) if not name.startswith("__")]})
    with contextlib.suppress(EndedError):
        while True:
            link.serve(link.receive())
    os._exit(0)


class Printed(io.RawIOBase):
    """Collects what a program prints, until the next message takes it along.

    Args:
        descriptor: of the process's own output, to which goes what is much.
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


class Reader(io.RawIOBase):
    """The tests' standard input."""

    def __init__(self, link):
        super().__init__()
        self.link, self.left = link, b""

    def readable(self):
        """It is."""
        return True

    def readinto(self, buffer):
        """A part of a line."""
        if not self.left:
            self.left = str(self.link.ask("read")).encode("utf-8", "surrogatepass")
        part, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
