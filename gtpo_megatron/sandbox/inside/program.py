"""Runs a program by itself: executes it with standard input, or loads it and calls its functions.

Runs inside the sandbox; needs the standard library only.
"""

import atexit  # noqa: F401 - loaded before any fork
import builtins
import gc
import io
import json
import os
import sys
import types

from gtpo_megatron.sandbox.inside.nodes import built, kinds_of
from gtpo_megatron.sandbox.inside.returned import as_exact_json, as_json
from gtpo_megatron.sandbox.inside.tracebacks import one_line

RECURSION_LIMIT = 50_000
"""LiveCodeBench's; what calls through C take of the stack (functions with a cache, generators) is some 30 MiB."""


def compiled(job):
    """The code of a job's program, and before it of what is run before it."""
    texts = {"stub.py": job["before"], "program.py": job["source"]}
    return tuple(compile(text, file, "exec", dont_inherit=True) for file, text in texts.items())


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
        sys.stderr.write(one_line(error))
    try:
        sys.modules["threading"]._shutdown()
        sys.modules["atexit"]._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        status = status or 1
        sys.stderr.write(one_line(error))
    os._exit(status & 0xFF)


def supply(names):
    """Puts the names of a prelude beneath the program's own."""
    vars(builtins).update(names)
    if "getrecursionlimit" in names:  # all of sys, whose streams are this process's own
        vars(builtins).update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, argv=sys.argv)


def load_and_call(code, cases, report, supplied):
    """Loads a program and reports on each call."""
    prepare()
    module = fresh_main()
    supply(supplied)
    module.__name__ = "program"
    try:
        for one in code:
            exec(one, vars(module))
    except BaseException as error:
        report({"status": "unloaded", "detail": one_line(error)})
        os._exit(1)
    for case in cases:
        try:
            output = called(module, case)
        except BaseException as error:
            report({"status": "error", "detail": one_line(error)})
        else:
            report({"status": "ok", "output": output})
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
