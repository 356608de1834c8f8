"""The process inside the sandbox that runs jobs, given to a bare Python as text; it needs the standard library only.

Three kinds of processes::

    server   reads jobs from a pipe, one line of JSON each; nothing of a job runs in it
    reaper   per job: process 1 of a process namespace of its own, so that all that the job starts ends with it
    program  per case, or per run of calls or tests: limits, no capabilities, seccomp, then the untrusted code
    tests    in Python: in the process of a plain program (see plain.py and together.py), or beside one that is not,
             likewise limited (see apart.py and link.py)

The server and the reaper read what a program writes, and do not act on it. What a case returned is compared outside,
and the text of tests is in no memory that a program may look into, so it does not learn what is expected of it.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
import types

PRELOADED = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math",
    "operator", "queue", "random", "re", "statistics", "string", "threading", "traceback", "typing",
)  # fmt: skip
"""Modules that short programs import; loaded once, before any fork."""

CLONE_NEWPID, CLONE_NEWIPC, SIGCHLD = 0x20000000, 0x08000000, 17
SYS_CLONE = 56
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4

LITERAL_DIGITS = 50_000
"""Digits of an integer in a program's text; reading one takes time that grows with their square."""
COMPILER_MIB = 4096
DETAIL_BYTES = 2000
"""Bytes kept of standard error."""
MANY = 1 << 20
"""Cases of which each has its own time, so that only the time for all counts."""
LINK = 60
"""First of the descriptors by which a program and its tests are connected."""
PACKAGE = "gtpo_megatron.sandbox.inside"
OVER = ("timeout", "out of time")
"""Statuses of the last case that was begun: its own time was over, or that of all."""
GRACE_S = 5.0
"""Time after a job's limits in which the reaper must have answered."""

libc = ctypes.CDLL(None, use_errno=True)


def called(returned, what):
    """Raises OSError if a C function returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), what)
    return returned


def main():
    """The server: answers every job with one line."""
    jobs, answers = os.dup(0), os.fdopen(os.dup(1), "wb")
    settings = json.loads(taken(jobs, int.from_bytes(taken(jobs, 8), "big")))
    for name in PRELOADED:
        __import__(name)
    sys.path += settings["packages"]
    parts = PACKAGE.split(".")
    for name in (".".join(parts[:number]) for number in (1, 2, 3)):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, text in settings["modules"].items():
        load(name, text)
    settings["supplied"] = module("prelude").names()
    settings["for_tests"] = module("prelude").for_tests(settings["supplied"])
    sys.set_int_max_str_digits(LITERAL_DIGITS)
    if settings["framework"]:
        make_ready_for_tests(settings)
    gc.disable()  # a collection in a fork would copy every page; programs enable it
    gc.freeze()
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if settings["is_isolated"]:
        called(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    answers.write(b'{"ready": true}\n')
    answers.flush()
    while sizes := taken(jobs, 16):
        job = json.loads(taken(jobs, int.from_bytes(sizes[:8], "big")))
        tests = taken(jobs, int.from_bytes(sizes[8:], "big"))
        with module("folders").files(settings) as folder:
            answers.write(run_job(job, tests, settings | {"folder": folder}).strip() + b"\n")
            answers.flush()
            forget(tests)


def make_ready_for_tests(settings):
    """Loads what tests in Python need, once, and before any of them is read; classes are frozen from here on."""
    sys.path += settings["framework"]
    settings["session"] = module("pytest_session").prepared(settings["folder"])
    module("plain_tables").prepare()
    settings["origins"] = module("prelude").origins(settings["supplied"])
    settings["is_frozen"] = module("together").freeze()


def load(name, text):
    """Makes a module of its text."""
    made = types.ModuleType(f"{PACKAGE}.{name}")
    sys.modules[made.__name__] = made
    setattr(sys.modules[PACKAGE], name, made)
    exec(compile(text, f"{name}.py of the sandbox", "exec", dont_inherit=True), vars(made))


def module(name):
    """A module of this folder, which is loaded."""
    return sys.modules[f"{PACKAGE}.{name}"]


def taken(descriptor, size):
    """So many bytes, in one place of the memory; none at the end of the file."""
    found = bytearray(size)
    view = memoryview(found)
    while view and (count := os.readv(descriptor, [view])):
        view = view[count:]
    return found if not view else bytearray()


def forget(tests):
    """Overwrites the text of tests."""
    tests[:] = bytes(len(tests))


def run_job(job, tests, settings):
    """Runs a job in a reaper; its answer as JSON."""
    reading, writing = os.pipe()
    flags = CLONE_NEWPID | CLONE_NEWIPC if settings["is_isolated"] else 0
    reaper = called(libc.syscall(SYS_CLONE, flags | SIGCHLD, 0, 0, 0, 0), "clone")
    if reaper == 0:
        try:
            os.close(reading)
            if settings["is_isolated"]:
                called(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
                # of the signals from inside, process 1 gets only those with a handler, as Python has for this one
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            answer = Reaper(job, tests, settings).answer()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    parts = []
    deadline = time.monotonic() + job["total_s"] + job["compile_s"] + GRACE_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts.append(part)
    os.close(reading)
    os.kill(reaper, signal.SIGKILL)
    os.waitpid(reaper, 0)
    return b"".join(parts) or b'{"failed": "the reaper gave no answer"}'


class Reaper:
    """Runs the cases of one job."""

    def __init__(self, job, tests, settings):
        self.job = job
        self.tests = tests
        self.settings = settings
        self.reading = None
        os.chdir(settings["folder"])
        self.deadline = time.monotonic() + job["total_s"]

    def answer(self):
        """The outcome as JSON."""
        try:
            run = self.python() if self.job["language"] == "python" else self.cpp()
        except CompileError as error:
            return {"compile_error": str(error)[:DETAIL_BYTES] or "it does not compile"}
        except NoCompilerError as error:
            return {"failed": str(error)}
        return {"results": run, "apart": self.reading.reason if self.reading else ""}

    def python(self):
        """Cases of a Python program, which is compiled once."""
        module("row_modules").offer(self.job["modules"])
        try:
            with module("confined").memory_limited(self.job["memory_mib"]):
                before = compile(self.job["before"], "stub.py", "exec", dont_inherit=True)
                code = before, compile(self.job["source"], "program.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise CompileError(f"{type(error).__name__}: {error}") from error
        program = module("program")
        supplied, self.for_tests = self.settings["supplied"], self.settings["for_tests"]
        if self.job["prelude"] is not None:
            supplied = module("prelude").names(self.job["prelude"])
            self.for_tests = module("prelude").for_tests(supplied)
        self.supplied, self.code = supplied, code
        return self.cases(
            lambda: self.thawed() or program.run_as_main(code, supplied),
            lambda run, nonce: (
                lambda: self.thawed() or program.load_and_do(code, run, program.reporter(nonce), supplied)
            ),
        )

    def thawed(self):
        """Makes classes changeable again, for a program that has no tests in its interpreter."""
        module("frozen").thaw()

    def cpp(self):
        """Cases of a C++ program, which is compiled once."""
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise NoCompilerError("no C++ compiler: install g++")
        with open("program.cpp", "w", encoding="utf-8", errors="replace") as file:
            file.write(self.job["source"])
        command = [compiler, "-O2", "-std=c++17", "-o", "program", "program.cpp"]
        compiling = {"case_s": self.job["compile_s"], "memory_mib": COMPILER_MIB}
        self.deadline = time.monotonic() + self.job["compile_s"]
        [done] = self.watch(lambda: os.execv(compiler, command), [""], stdin="", limits=compiling, may_fork=True)
        self.deadline = time.monotonic() + self.job["total_s"]
        if done["status"] != "ok":
            raise CompileError(done["detail"] or done["status"])
        return self.cases(lambda: os.execv("./program", ["./program"]), None)

    def cases(self, as_main, loaded):
        """The results of all cases: one process per case of standard input, one per run of other cases."""
        results = []
        cases = self.job["cases"]
        while len(results) < len(cases):
            if any(result["status"] in OVER for result in results):
                results.append({"status": "not run"})
                continue
            case = cases[len(results)]
            if case["stdin"] is not None:
                results += self.watch(as_main, [""], stdin=case["stdin"])
                continue
            run = []
            for following in cases[len(results) :]:
                if following["stdin"] is not None or following["is_call"] != case["is_call"]:
                    break
                run.append(following)
            if case["is_call"]:
                nonce = os.urandom(16).hex()
                results += self.watch(loaded(run, nonce), run, stdin="", nonce=nonce)
            else:
                results += self.tested(run)
        return results

    def tested(self, run):
        """The results of tests in Python; a program that has ended is begun anew behind the test in which it did."""
        progress = module("test_reports").Progress(len(run))
        self.read()
        while left := progress.unfinished():
            reports, status, detail = self.examined(run, left)
            if reason := next((str(one["apart"]) for one in reports if "apart" in one), ""):
                self.reading.reason, progress = reason, module("test_reports").Progress(len(run))
                continue
            progress.take(reports, status, detail)
        return progress.results()

    def read(self):
        """Finds out whether the program may share an interpreter with its tests, from its text and theirs."""
        if self.reading is not None:
            return
        is_usual = self.job["prelude"] is None
        known = self.settings["origins"] if is_usual else module("prelude").origins(self.supplied)
        self.reading = module("plain").read(
            [self.job["before"], self.job["source"]], lambda name: name.encode() in self.tests, known
        )
        if not self.settings["is_frozen"]:
            self.reading.reason = "its interpreter cannot be frozen"

    def examined(self, run, left):
        """The reports of one process of tests, and how it ended.

        Args:
            run: the cases.
            left: their numbers in ``run``, and how many of their tests were run.
        """
        nonce = os.urandom(16).hex()
        reading, supplied, session = self.reading, self.for_tests, self.settings["session"]

        def begun():
            given = json.loads(self.tests)
            cases = [(at, skip, *given["cases"][run[at]["place"]]) for at, skip in left]
            module("program").fresh_main()
            return [
                {"number": at, "skip": skip, "code": given["texts"][text], "expects": expects, "own": own}
                for at, skip, text, expects, own in cases
            ]

        def together():
            texts = {"stub.py": self.job["before"], "program.py": self.job["source"]}
            module("together").examine(
                texts, begun(), imports=reading.imports, own_names=reading.own_names, for_program=self.supplied,
                supplied=supplied, report=module("test_runner").reporter(nonce), session=session,
            )  # fmt: skip
            os._exit(0)

        def offered():
            forget(self.tests)
            self.thawed()
            module("program").offer(self.code, self.supplied, LINK, LINK + 1)

        def apart():
            module("apart").examine(
                begun(), LINK, LINK + 1, imports=reading.imports, supplied=supplied,
                report=module("test_runner").reporter(nonce), session=session,
            )  # fmt: skip
            os._exit(0)

        if not reading.reason:
            seen, ended, status = self.observe(together, stdin="", nonce=nonce)
        else:
            pipes = [os.pipe(), os.pipe()]
            theirs, ours = (pipes[0][0], pipes[1][1]), (pipes[1][0], pipes[0][1])
            seen, ended, status = self.observe(apart, stdin="", nonce=nonce, link=ours, beside=(offered, theirs))
        detail = b"".join(seen.written["err"])[-DETAIL_BYTES:].decode("utf-8", "replace")
        return seen.reports, ended or "error", detail or left_with(status)

    def watch(self, body, run, *, stdin, nonce=None, may_fork=False, limits=None):
        """Runs a process; the results of at least one case, up to the one at which it ended.

        With a nonce, the process reports each case by a line on descriptor 3; else its exit is the only result.
        """
        seen, ended, status = self.observe(
            body, stdin=stdin, nonce=nonce, may_fork=may_fork, limits=limits, num_cases=len(run)
        )
        return seen.results(ended, status, num=len(run))

    def observe(self, body, *, stdin, nonce=None, may_fork=False, limits=None, link=(), beside=None, num_cases=MANY):
        """Runs a process to its end; what it has written, the limit that it broke or None, and its exit code.

        Args:
            body: what it does.
            stdin: its standard input.
            nonce: what its reports begin with, which it makes on descriptor 3.
            may_fork: it is a compiler.
            limits: other ones than the job's.
            link: its descriptors from ``LINK`` on.
            beside: body and link of a second process, which ends with it.
            num_cases: each has its own time of the processor.
        """
        limits = self.job | (limits or {})
        given = os.memfd_create("stdin")
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in ("out", "err", "reports")}
        streams = [given, *(pipes[name][1] for name in pipes)]
        processes = []
        for what, ends, number in ((body, link, 4), *([(*beside, 3)] if beside else [])):
            process = os.fork()
            if process == 0:
                try:
                    # a second process has no descriptor 3: it reports nothing
                    self.enter([*streams[:number], *ends], [*range(number), *range(LINK, LINK + len(ends))])
                    module("confined").confine(limits, self.settings, num_cases=num_cases, may_fork=may_fork)
                    what()
                except BaseException as error:
                    os.write(2, f"{type(error).__name__}: {error}"[:DETAIL_BYTES].encode("utf-8", "replace"))
                finally:
                    os._exit(1)
            processes.append(process)
        for descriptor in (*streams, *link, *(beside[1] if beside else ())):
            os.close(descriptor)
        seen = Watched({name: reading for name, (reading, _) in pipes.items()}, self.job["output_bytes"], nonce)
        ended = seen.until_end(case_s=limits["case_s"], deadline=self.deadline, last="reports" if beside else "")
        if ended is not None:
            os.kill(processes[0], signal.SIGKILL)
        _, status = os.waitpid(processes[0], 0)
        for process in processes[1:]:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for reading, _ in pipes.values():
            os.close(reading)
        return seen, ended, os.waitstatus_to_exitcode(status)

    def enter(self, descriptors, numbers):
        """Gives this process these descriptors by these numbers, and no others."""
        for at, descriptor in enumerate(descriptors):
            os.dup2(descriptor, 90 + at)
        for at, number in enumerate(numbers):
            os.dup2(90 + at, number)
        kept = sorted(numbers)
        for low, high in zip([-1, *kept], [*kept, 256], strict=True):
            if low + 1 < high:  # an empty range may close all
                os.closerange(low + 1, high)


class Watched:
    """Collects what a process writes, until it ends or breaks a limit."""

    def __init__(self, pipes, output_bytes, nonce):
        self.names = {descriptor: name for name, descriptor in pipes.items()}
        self.left = output_bytes
        self.nonce = nonce
        self.written = {"out": [], "err": [], "reports": []}
        self.reports = []

    def until_end(self, *, case_s, deadline, last=""):
        """None once the process has closed its pipes, or the last one; else the status of the limit that it broke."""
        poll = select.poll()
        for descriptor in self.names:
            poll.register(descriptor, select.POLLIN)
        num_open = len(self.names)
        due = time.monotonic() + case_s
        while num_open:
            left = min(due, deadline) - time.monotonic()
            if left <= 0:
                return "timeout" if due <= deadline else "out of time"
            for descriptor, _ in poll.poll(left * 1000 + 1):
                part = os.read(descriptor, 1 << 16)
                name = self.names[descriptor]
                if not part:
                    poll.unregister(descriptor)
                    num_open = 0 if name == last else num_open - 1
                    continue
                self.left -= len(part)
                if self.left < 0:
                    return "output"
                self.written[name].append(part)
                if name == "reports" and self.take_reports():
                    due = time.monotonic() + case_s
        return None

    def take_reports(self):
        """Parses whole lines of reports; whether there was one."""
        *lines, rest = b"".join(self.written["reports"]).split(b"\n")
        self.written["reports"] = [rest]
        found = False
        for line in lines:
            with contextlib.suppress(ValueError, UnicodeDecodeError, RecursionError):
                report = json.loads(line)
                if isinstance(report, dict) and self.nonce and report.get("nonce") == self.nonce:
                    self.reports.append(report)
                    found = True
        return found

    def results(self, ended, status, *, num):
        """The results of the cases that were begun."""
        detail = b"".join(self.written["err"])[-DETAIL_BYTES:].decode("utf-8", "replace")
        if self.nonce is None:
            output = b"".join(self.written["out"]).decode("utf-8", "replace")
            if ended is None and status == 0:
                return [{"status": "ok", "output": output, "detail": detail}]
            return [{"status": ended or "error", "output": output, "detail": detail or left_with(status)}]
        found = [
            {
                "status": str(report.get("status")),
                "output": str(report.get("output", "")),
                "detail": str(report.get("detail", ""))[:DETAIL_BYTES],
            }
            for report in self.reports[:num]
        ]
        if len(found) < num and (not found or found[-1]["status"] != "unloaded"):
            found.append({"status": ended or "error", "output": "", "detail": detail or left_with(status)})
        if found[-1]["status"] == "unloaded":  # the program itself failed, so no case of it can be run
            found[-1]["status"] = "error"
            found += [dict(found[-1]) for _ in range(num - len(found))]
        return found


class CompileError(Exception):
    """The program does not compile."""


class NoCompilerError(Exception):
    """There is no compiler for the language."""


def left_with(status):
    """How a process ended, in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"left with status {status}"


if __name__ == "__main__":
    main()
