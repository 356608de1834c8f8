"""Jobs that a sandbox is given, and its answers."""

from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal["ok", "error", "timeout", "out of time", "output", "not run", "skipped", "unused"]
"""How a case ended: ``ok``; ``error``: it raised, was killed or left with a status; ``timeout``: it took longer than a
case may; ``out of time``: all together did; ``output``: it wrote more than it may; ``not run``: an earlier one used up
its time or that of all; ``skipped``: tests in Python say so; ``unused``: tests in Python passed and used nothing of the
program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to do with a program.

    Attributes:
        stdin: text on its standard input; None: the program is loaded, and the attributes below say what to do with it.
        function: name of a function or of a method of its class ``Solution``, to be called.
        arguments: arguments of the call, a list as JSON.
        kinds: kinds of the arguments and of the result, where they are lists or trees of nodes, see
            ``inside/nodes.py``; (): as the function's own annotations say.
        is_exact: whether the result is written for a comparison by ``==``, see ``inside/returned.py``.
        code: tests in Python: what pytest collects in it, or else the text itself, such as assertions.
        num_tests: number of tests in the code, as far as its text shows; pytest must then find one; 0: the code itself
            is the test.
        own: names of Python or of the prelude that mean the program's in these tests, such as ``sum`` where that is
            the function to be written.
    """

    stdin: str | None = None
    function: str = ""
    arguments: str = "[]"
    kinds: tuple[str, ...] = ()
    is_exact: bool = False
    code: str = ""
    num_tests: int = 0
    own: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the time, memory and output of a program.

    Attributes:
        case_s: seconds per case.
        total_s: seconds for all cases, without compiling.
        compile_s: seconds for the compiler.
        memory_mib: size of the address space.
        output_bytes: bytes written per case, to standard output and error together.
        file_mib: size of a file, and of all files together.
    """

    case_s: float = 5.0
    total_s: float = 30.0
    compile_s: float = 30.0
    memory_mib: int = 1024
    output_bytes: int = 1 << 20
    file_mib: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program with its cases.

    Attributes:
        source: text of the program.
        language: language of the program; C++ has cases of standard input only.
        cases: cases in order; the first one that takes too long ends the job.
        limits: limits of all cases.
        before: Python that is run before the program, among its names; its lines are not counted.
        prelude: Python that binds the names which the program may use without an import; None: those of ``prelude.py``.
        modules: names and texts of modules that the program and its tests may import.
    """

    source: str
    language: Literal["python", "cpp"]
    cases: tuple[Case, ...]
    limits: Limits = Limits()
    before: str = ""
    prelude: str | None = None
    modules: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """Result of a test that pytest has collected.

    Attributes:
        name: name of the test, ``CLASS::METHOD[PARAMETERS]``.
        status: status of the test.
        detail: exception of the test, in a line.
    """

    __test__ = False
    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of a case.

    Attributes:
        status: status of the case.
        output: standard output, or the returned value as JSON; bytes that are not UTF-8 are replaced.
        detail: exception in a line, or the end of standard error.
        tests: results of the tests that pytest has collected in the code, in order; none if it finds none, or they
            could not be run.
    """

    status: Status
    output: str = ""
    detail: str = ""
    tests: tuple[TestResult, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a job.

    Attributes:
        results: results of the cases; empty if the program does not compile.
        compile_error: message of the compiler; "" if the program compiled.
        separate_process: reason why the program had another process than its tests in Python; "" if it had the same, or
            if there are none.
    """

    results: tuple[CaseResult, ...] = ()
    compile_error: str = ""
    separate_process: str = ""


class Sandbox(Protocol):
    """Runs one job at a time."""

    def run(self, job: Job) -> Outcome:
        """Runs a job within its limits.

        Raises:
            SandboxError: the sandbox failed, or has no compiler for the language.
        """
        ...

    def close(self) -> None:
        """Ends all of its processes."""
        ...
