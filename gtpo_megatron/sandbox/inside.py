"""The process inside the sandbox that runs jobs, given to a bare Python as text; it needs the standard library only.

Three kinds of processes::

    keeper   reads jobs from a pipe, one line of JSON each; nothing of a job runs in it
    reaper   per job: process 1 of a process namespace of its own, so that all that the job starts ends with it
    program  per case, or per run of calls: limits, no capabilities, seccomp, then the untrusted code

The keeper and the reaper read what a program writes, and do not act on it. What a case returned is compared outside,
so a program does not learn what is expected of it.
"""

import base64
import contextlib
import ctypes
import gc
import io
import json
import os
import resource
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
SYS_CLONE, SYS_CAPSET = 56, 126
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
MS_NOSUID, MS_NODEV = 2, 4

MAX_INODES = 4096
MAX_THREADS = 64
MAX_OPEN_FILES = 64
COMPILER_MIB = 4096
DETAIL_BYTES = 2000
"""Bytes kept of standard error."""
STACK_MIB = 256
GRACE_S = 5.0
"""Time after a job's limits in which the reaper must have answered."""

libc = ctypes.CDLL(None, use_errno=True)


def called(returned, what):
    """Raises OSError if a C function returned -1."""
    if returned == -1:
        raise OSError(ctypes.get_errno(), what)
    return returned


def main():
    """The keeper: answers every job with one line."""
    settings = json.loads(sys.argv[1])
    for name in PRELOADED:
        __import__(name)
    gc.disable()  # a collection in a fork would copy every page; programs enable it
    gc.freeze()
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if settings["is_isolated"]:
        called(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        size = f"size={settings['file_mib']}m,nr_inodes={MAX_INODES},mode=1777"
        called(
            libc.mount(b"tmpfs", settings["folder"].encode(), b"tmpfs", MS_NOSUID | MS_NODEV, size.encode()), "mount"
        )
    answers.write(b'{"ready": true}\n')
    answers.flush()
    while line := jobs.readline():
        answers.write(run_job(json.loads(line), settings).strip() + b"\n")
        answers.flush()
        clean(settings["folder"])


def run_job(job, settings):
    """Runs a job in a reaper; its answer as JSON."""
    reading, writing = os.pipe()
    flags = CLONE_NEWPID | CLONE_NEWIPC if settings["is_isolated"] else 0
    reaper = called(libc.syscall(SYS_CLONE, flags | SIGCHLD, 0, 0, 0, 0), "clone")
    if reaper == 0:
        try:
            os.close(reading)
            if settings["is_isolated"]:
                called(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
            answer = Reaper(job, settings).answer()
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


def clean(folder):
    """Empties the folder of programs, all of which have ended."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


class Reaper:
    """Runs the cases of one job."""

    def __init__(self, job, settings):
        self.job = job
        self.settings = settings
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
        return {"results": run}

    def python(self):
        """Cases of a Python program, which is compiled once."""
        try:
            with memory_limited(self.job["memory_mib"]):
                code = compile(self.job["source"], "program.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise CompileError(f"{type(error).__name__}: {error}") from error
        return self.cases(lambda: run_as_main(code), lambda run, nonce: lambda: load_and_do(code, run, nonce))

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
            if any(result["status"] == "timeout" for result in results):
                results.append({"status": "not run"})
                continue
            case = cases[len(results)]
            if case["stdin"] is not None:
                results += self.watch(as_main, [""], stdin=case["stdin"])
                continue
            run = []
            while len(results) + len(run) < len(cases) and cases[len(results) + len(run)]["stdin"] is None:
                run.append(cases[len(results) + len(run)])
            nonce = os.urandom(16).hex()
            results += self.watch(loaded(run, nonce), run, stdin="", nonce=nonce)
        return results

    def watch(self, body, run, *, stdin, nonce=None, may_fork=False, limits=None):
        """Runs a process; the results of at least one case, up to the one at which it ended.

        With a nonce, the process reports each case by a line on descriptor 3; else its exit is the only result.
        """
        limits = self.job | (limits or {})
        given = os.memfd_create("stdin")
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in ("out", "err", "reports")}
        process = os.fork()
        if process == 0:
            try:
                for number, descriptor in enumerate((given, *(pipes[name][1] for name in pipes))):
                    os.dup2(descriptor, 90 + number)
                for number in range(4):
                    os.dup2(90 + number, number)
                os.closerange(4, 256)
                confine(limits, self.settings, num_cases=len(run), may_fork=may_fork)
                body()
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}"[:DETAIL_BYTES].encode("utf-8", "replace"))
            finally:
                os._exit(1)
        os.close(given)
        for _, writing in pipes.values():
            os.close(writing)
        seen = Watched({name: reading for name, (reading, _) in pipes.items()}, self.job["output_bytes"], nonce)
        ended = seen.until_end(case_s=limits["case_s"], deadline=self.deadline)
        if ended is not None:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        for reading, _ in pipes.values():
            os.close(reading)
        return seen.results(ended, os.waitstatus_to_exitcode(status), num=len(run))


class Watched:
    """What a process writes, until it ends or breaks a limit."""

    def __init__(self, pipes, output_bytes, nonce):
        self.names = {descriptor: name for name, descriptor in pipes.items()}
        self.left = output_bytes
        self.nonce = nonce
        self.written = {"out": [], "err": [], "reports": []}
        self.reports = []

    def until_end(self, *, case_s, deadline):
        """None once the process has closed its pipes; else the status of the limit that it broke."""
        poll = select.poll()
        for descriptor in self.names:
            poll.register(descriptor, select.POLLIN)
        num_open = len(self.names)
        due = time.monotonic() + case_s
        while num_open:
            left = min(due, deadline) - time.monotonic()
            if left <= 0:
                return "timeout"
            for descriptor, _ in poll.poll(left * 1000 + 1):
                part = os.read(descriptor, 1 << 16)
                if not part:
                    poll.unregister(descriptor)
                    num_open -= 1
                    continue
                name = self.names[descriptor]
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


@contextlib.contextmanager
def memory_limited(mib):
    """Limits the address space for a while."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    hard = before[1]
    soft = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def confine(limits, settings, *, num_cases, may_fork):
    """Limits this process for good: it holds untrusted code from here on."""
    seconds = int(limits["compile_s"] if may_fork else min(limits["case_s"] * num_cases, limits["total_s"])) + 2
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mib"] << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, settings["file_mib"] << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, MAX_THREADS),
        (resource.RLIMIT_STACK, STACK_MIB << 20),
    ):
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if kind != resource.RLIMIT_NPROC or settings["is_isolated"]:  # counts all of the user's processes outside
            resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error that a program can see
    called(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if settings["is_isolated"]:
        drop_capabilities()
        use_filter(base64.b64decode(settings["compiler_filter" if may_fork else "program_filter"]))


def drop_capabilities():
    """Gives up all capabilities; no_new_privs is set, so that none comes back."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    called(libc.syscall(SYS_CAPSET, header, (ctypes.c_uint32 * 6)()), "capset")


def use_filter(code):
    """Installs a seccomp filter."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    mode_filter = 2
    called(libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.byref(Filter(len(code) // 8, code)), 0, 0), "seccomp")


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


def run_as_main(code):
    """Runs a program as Python does, and leaves."""
    module = fresh_main()
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        sys.stderr.write(last_line(error))
    try:
        sys.modules["threading"]._shutdown()
        sys.stdout.flush()
    except BaseException as error:
        status = status or 1
        sys.stderr.write(last_line(error))
    os._exit(status & 0xFF)


def load_and_do(code, cases, nonce):
    """Loads a program and reports on each case."""
    module = fresh_main()
    module.__name__ = "program"

    def report(status, output="", detail=""):
        line = json.dumps({"nonce": nonce, "status": status, "output": output, "detail": detail})
        os.write(3, line.encode("utf-8", "replace") + b"\n")

    try:
        exec(code, module.__dict__)
    except BaseException as error:
        report("unloaded", detail=last_line(error))
        os._exit(1)
    for case in cases:
        try:
            if case["function"]:
                output = as_json(found(module, case["function"])(*json.loads(case["arguments"])))
            else:
                exec(compile(case["code"], "tests.py", "exec", dont_inherit=True), module.__dict__)
                output = ""
        except BaseException as error:
            report("error", detail=last_line(error))
        else:
            report("ok", output)
    os._exit(0)


def found(module, name):
    """A function of the program, or a method of its class Solution."""
    if not hasattr(module, name) and hasattr(module, "Solution"):
        return getattr(module.Solution(), name)
    return getattr(module, name)


def as_json(value):
    """A returned value as JSON; sets are sorted, tuples are lists, other objects are their text."""

    def plain(one):
        if isinstance(one, set | frozenset):
            return sorted(one)
        return list(one) if isinstance(one, collections_of_values) else repr(one)

    collections_of_values: tuple = (type({}.keys()), type({}.values()), range, sys.modules["collections"].deque)
    return json.dumps(value, default=plain)


def last_line(error):
    """An exception in a line, with the line of the program."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program.py":
            place = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"[:DETAIL_BYTES]


if __name__ == "__main__":
    main()
