"""The reaper of a job: process 1 of its namespace, which compiles the program and runs its cases in processes.

It reads what a program writes, and does not act on it. Runs inside the sandbox; needs the standard library only.
"""

import os
import shutil
from itertools import groupby

from gtpo_megatron.sandbox.inside import prelude, program, text_modules
from gtpo_megatron.sandbox.inside.limits import memory_limited
from gtpo_megatron.sandbox.inside.processes import Processes, reporter
from gtpo_megatron.sandbox.inside.same_process import immutable_classes
from gtpo_megatron.sandbox.inside.tracebacks import DETAIL_BYTES

COMPILER_MIB = 4096
OVER = ("timeout", "out of time")
"""Statuses of the last case that was begun: its own time was over, or that of all."""


class CompileError(Exception):
    """The program does not compile."""


class NoCompilerError(Exception):
    """There is no compiler for the language."""


class Reaper:
    """Runs the cases of one job.

    Args:
        job: as ``sandbox/server.py`` writes it.
        tests: text of its tests in Python.
        settings: settings of the server.
    """

    def __init__(self, job, tests, settings):
        self.job, self.tests, self.settings = job, tests, settings
        self.processes = Processes(job, settings)
        self.processes.begin(job["total_s"])
        self.tested = None
        os.chdir(settings["folder"])

    def answer(self):
        """The outcome as JSON."""
        try:
            results = self._python() if self.job["language"] == "python" else self._cpp()
        except CompileError as error:
            return {"compile_error": str(error)[:DETAIL_BYTES] or "it does not compile"}
        except NoCompilerError as error:
            return {"failed": str(error)}
        return {"results": results, "separate_process": self.tested.reason if self.tested else ""}

    def enter_program(self):
        """Leaves a process to the program alone: no text of tests in its memory, and classes as Python has them."""
        self.tests[:] = bytes(len(self.tests))
        immutable_classes.thaw()

    def _python(self):
        """Cases of a Python program, which is compiled once."""
        text_modules.offer(self.job["modules"])
        try:
            with memory_limited(self.job["memory_mib"]):
                codes = program.compiled(self.job)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise CompileError(f"{type(error).__name__}: {error}") from error
        given = self.job["prelude"]
        self.codes, self.supplied = codes, self.settings["supplied"] if given is None else prelude.names(given)

        def as_main():
            self.enter_program()
            program.run_as_main(codes, self.supplied)

        return self._results(as_main)

    def _cpp(self):
        """Cases of a C++ program, which is compiled once."""
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise NoCompilerError("no C++ compiler: install g++")
        with open("program.cpp", "w", encoding="utf-8", errors="replace") as file:
            file.write(self.job["source"])
        command = [compiler, "-O2", "-std=c++17", "-o", "program", "program.cpp"]
        limits = {"case_s": self.job["compile_s"], "memory_mib": COMPILER_MIB}
        self.processes.begin(self.job["compile_s"])
        seen = self.processes.run(lambda: os.execv(compiler, command), limits=limits, may_fork=True)
        self.processes.begin(self.job["total_s"])
        if seen.broken_limit or seen.exit_status:
            raise CompileError(seen.detail)
        return self._results(lambda: os.execv("./program", ["./program"]))

    def _results(self, as_main):
        """The results of all cases: one process per case of standard input, one per run of calls or of tests.

        Args:
            as_main: function that runs the program on standard input.
        """
        ways = {
            "input": lambda left: [self._printed(as_main, left[0]["stdin"])],
            "call": self._returned,
            "tests": self._tested,
        }
        results = []
        for kind, cases in groupby(self.job["cases"], _kind):
            left = list(cases)
            while left:
                is_over = any(result["status"] in OVER for result in results)
                found = [{"status": "not run"}] if is_over else ways[kind](left)
                results += found
                left = left[len(found) :]
        return results

    def _printed(self, as_main, stdin):
        """The result of a case of standard input."""
        seen = self.processes.run(as_main, stdin=stdin)
        is_ok = not seen.broken_limit and seen.exit_status == 0
        status, detail = ("ok", seen.errors) if is_ok else (seen.status, seen.detail)
        return {"status": status, "output": seen.output, "detail": detail}

    def _returned(self, calls):
        """The results of calls, up to the one in which the program has ended; of all, if it does not load."""
        nonce = os.urandom(16).hex()

        def body():
            self.enter_program()
            program.load_and_call(self.codes, calls, reporter(nonce), self.supplied)

        seen = self.processes.run(body, nonce=nonce, num_cases=len(calls))
        found = [
            {
                "status": str(report.get("status")),
                "output": str(report.get("output", "")),
                "detail": str(report.get("detail", ""))[:DETAIL_BYTES],
            }
            for report in seen.reports[: len(calls)]
        ]
        if len(found) < len(calls) and (not found or found[-1]["status"] != "unloaded"):
            found.append({"status": seen.status, "output": "", "detail": seen.detail})
        if found[-1]["status"] == "unloaded":
            found[-1]["status"] = "error"
            found += [dict(found[-1]) for _ in range(len(calls) - len(found))]
        return found

    def _tested(self, cases):
        """The results of tests in Python."""
        if self.tested is None:
            from gtpo_megatron.sandbox.inside.python_tests import TestProcesses  # here, see main.py

            self.tested = TestProcesses(self)
        return self.tested.results(cases)


def _kind(case):
    """Whether a case is one of standard input, a call, or tests in Python."""
    return "input" if case["stdin"] is not None else "call" if case["function"] else "tests"
