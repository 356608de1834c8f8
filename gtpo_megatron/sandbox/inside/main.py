"""The server: a bare Python inside the sandbox that is given jobs by a pipe, and forks a reaper for each.

Nothing of a job runs in it. What short programs import (:mod:`.prelude`), and for tests in Python pytest, is loaded
before any fork. Runs inside the sandbox; needs the standard library only.
"""

import gc
import json
import os
import select
import signal
import sys
import threading  # noqa: F401 - programs import it, as what the prelude has: it is loaded before any fork
import time
import traceback  # noqa: F401 - likewise

from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.folders import files
from gtpo_megatron.sandbox.inside.limits import called, libc
from gtpo_megatron.sandbox.inside.reaper import Reaper
from gtpo_megatron.sandbox.inside.text_modules import read_exactly

CLONE_NEWPID, CLONE_NEWIPC, SIGCHLD = 0x20000000, 0x08000000, 17
SYS_CLONE = 56
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4

LITERAL_DIGITS = 50_000
"""Digits of an integer in a program's text; reading one takes time that grows with their square."""
GRACE_S = 5.0
"""Time after a job's limits in which the reaper must have answered."""


def main(settings):
    """Answers every job with one line.

    Args:
        settings: see ``sandbox/server.py``.
    """
    jobs, answers = os.dup(0), os.fdopen(os.dup(1), "wb")
    sys.path += settings["packages"]
    settings["supplied"] = prelude.names()
    sys.set_int_max_str_digits(LITERAL_DIGITS)
    if settings["framework"]:
        from gtpo_megatron.sandbox.inside import python_tests  # here, because it is large to fork

        sys.path += settings["framework"]
        python_tests.prepare(settings)
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
    while sizes := read_exactly(jobs, 16):
        job = json.loads(read_exactly(jobs, int.from_bytes(sizes[:8], "big")))
        tests = read_exactly(jobs, int.from_bytes(sizes[8:], "big"))
        with files(settings) as folder:
            answers.write(run_job(job, tests, settings | {"folder": folder}).strip() + b"\n")
            answers.flush()
            tests[:] = bytes(len(tests))  # no later program finds it in this memory


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
