"""Processes that hold untrusted code: forked, limited, and watched until they end or break a limit.

Runs inside the sandbox; needs the standard library only.
"""

import contextlib
import json
import os
import select
import signal
import time

from gtpo_megatron.sandbox.inside.limits import confine
from gtpo_megatron.sandbox.inside.tracebacks import DETAIL_BYTES

REPORTS = 3
"""Descriptor on which a process reports, after standard input, output and error."""
CHANNEL = (60, 61)
"""Descriptors by which a program and its tests in two processes read and write."""
UNUSED = 90
"""First of the descriptors that no process has otherwise."""
MANY = 1 << 20
"""Cases of which each has its own time, so that only the time for all counts."""


def reporter(nonce):
    """A function that reports by lines of JSON, which nobody else can begin so."""

    def report(fields):
        os.write(REPORTS, json.dumps({"nonce": nonce} | fields).encode("utf-8", "replace") + b"\n")

    return report


class Processes:
    """Starts the processes of a job, one or two at a time.

    Args:
        limits: limits of the job: ``case_s``, ``total_s``, ``compile_s``, ``memory_mib``, ``output_bytes``.
        settings: settings of the server.
    """

    def __init__(self, limits, settings):
        self.limits, self.settings = limits, settings
        self.deadline = 0.0

    def begin(self, seconds):
        """Gives all processes from here on so much time together."""
        self.deadline = time.monotonic() + seconds

    def run(self, body, *, stdin="", nonce="", num_cases=1, may_fork=False, limits=None, channel=(), beside=None):
        """Runs a process to its end, and says what it has written and how it ended.

        Args:
            body: function that the process calls.
            stdin: text of its standard input.
            nonce: beginning of its reports; "": it makes none.
            num_cases: number of cases, each with its own time of the processor.
            may_fork: whether it may start processes: it is a compiler.
            limits: limits that differ from the job's.
            channel: two descriptors, which it has as ``CHANNEL``.
            beside: body and channel of a second process, which ends with it, and reports nothing.
        """
        limits = self.limits | (limits or {})
        given = os.memfd_create("stdin")
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in ("out", "err", "reports")}
        streams = [given, *(pipes[name][1] for name in pipes)]
        processes = []
        for what, ends, number in ((body, channel, REPORTS + 1), *([(*beside, REPORTS)] if beside else [])):
            process = os.fork()
            if process == 0:
                try:
                    _enter([*streams[:number], *ends], [*range(number), *CHANNEL[: len(ends)]])
                    confine(limits, self.settings, num_cases=num_cases, may_fork=may_fork)
                    what()
                except BaseException as error:
                    os.write(2, f"{type(error).__name__}: {error}"[:DETAIL_BYTES].encode("utf-8", "replace"))
                finally:
                    os._exit(1)
            processes.append(process)
        for descriptor in (*streams, *channel, *(beside[1] if beside else ())):
            os.close(descriptor)
        seen = Watched({name: reading for name, (reading, _) in pipes.items()}, limits["output_bytes"], nonce)
        seen.until_end(case_s=limits["case_s"], deadline=self.deadline, last="reports" if beside else "")
        if seen.broken_limit:
            os.kill(processes[0], signal.SIGKILL)
        _, status = os.waitpid(processes[0], 0)
        for process in processes[1:]:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for reading, _ in pipes.values():
            os.close(reading)
        seen.exit_status = os.waitstatus_to_exitcode(status)
        return seen


def _enter(descriptors, numbers):
    """Gives this process these descriptors by these numbers, and no others."""
    for at, descriptor in enumerate(descriptors):
        os.dup2(descriptor, UNUSED + at)
    for at, number in enumerate(numbers):
        os.dup2(UNUSED + at, number)
    kept = sorted(numbers)
    for low, high in zip([-1, *kept], [*kept, 256], strict=True):
        if low + 1 < high:  # an empty range may close all
            os.closerange(low + 1, high)


class Watched:
    """What a process writes, until it ends or breaks a limit.

    Args:
        pipes: descriptors by ``out``, ``err`` and ``reports``.
        output_bytes: limit of all of them together.
        nonce: beginning of reports; "": there are none.

    Attributes:
        reports: objects of JSON, in order.
        broken_limit: status of the limit that was broken; "" if none was.
        exit_status: exit status of the process.
    """

    def __init__(self, pipes, output_bytes, nonce):
        self.names = {descriptor: name for name, descriptor in pipes.items()}
        self.left = output_bytes
        self.nonce = nonce
        self.written = {"out": [], "err": [], "reports": []}
        self.reports = []
        self.broken_limit, self.exit_status = "", 0

    def until_end(self, *, case_s, deadline, last=""):
        """Reads until the process has closed its pipes, or the last one, or has broken a limit."""
        poll = select.poll()
        for descriptor in self.names:
            poll.register(descriptor, select.POLLIN)
        num_open = len(self.names)
        due = time.monotonic() + case_s
        while num_open:
            left = min(due, deadline) - time.monotonic()
            if left <= 0:
                self.broken_limit = "timeout" if due <= deadline else "out of time"
                return
            for descriptor, _ in poll.poll(left * 1000 + 1):
                part = os.read(descriptor, 1 << 16)
                name = self.names[descriptor]
                if not part:
                    poll.unregister(descriptor)
                    num_open = 0 if name == last else num_open - 1
                    continue
                self.left -= len(part)
                if self.left < 0:
                    self.broken_limit = "output"
                    return
                self.written[name].append(part)
                if name == "reports" and self._take_reports():
                    due = time.monotonic() + case_s

    def _take_reports(self):
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

    @property
    def status(self):
        """How the process ended, which has not reported more."""
        return self.broken_limit or "error"

    @property
    def output(self):
        """Standard output as text."""
        return b"".join(self.written["out"]).decode("utf-8", "replace")

    @property
    def errors(self):
        """The end of standard error as text."""
        return b"".join(self.written["err"])[-DETAIL_BYTES:].decode("utf-8", "replace")

    @property
    def detail(self):
        """The end of standard error, or how the process ended, in words."""
        return self.errors or left_with(self.exit_status)


def left_with(status):
    """How a process ended, in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"left with status {status}"
