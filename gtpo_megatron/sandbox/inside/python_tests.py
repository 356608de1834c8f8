"""Tests in Python of a job: in which process its program is, and what became of each test.

A program shares the process of its tests if its text passes the static check, and runs in a process beside it if not,
or if it turns out to do what its text does not show. Runs inside the sandbox; needs the standard library and pytest.
"""

import json
import os

from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.inside.processes import CHANNEL, MANY, reporter
from gtpo_megatron.sandbox.inside.program import fresh_main
from gtpo_megatron.sandbox.inside.same_process import local_program
from gtpo_megatron.sandbox.inside.separate_process import program_side, remote_program
from gtpo_megatron.sandbox.inside.static_check import allowlist, check
from gtpo_megatron.sandbox.inside.testing import pytest_session
from gtpo_megatron.sandbox.inside.testing.reports import Progress


def prepare(settings):
    """Loads what tests in Python need, before any of them is read; classes are immutable from here on."""
    settings["session"] = pytest_session.prepared(settings["folder"])
    allowlist.prepare()
    settings["origins"] = prelude.origins(settings["supplied"])
    settings["for_tests"] = prelude.for_tests(settings["supplied"])
    settings["is_frozen"] = local_program.freeze()


class TestProcesses:
    """Runs the tests of a job.

    Args:
        reaper: reaper of the job.

    Attributes:
        reason: reason for a process of its own; "" if the program is in that of its tests.
    """

    __test__ = False

    def __init__(self, reaper):
        self.reaper, settings = reaper, reaper.settings
        self.texts = {"stub.py": reaper.job["before"], "program.py": reaper.job["source"]}
        is_usual, supplied = reaper.job["prelude"] is None, reaper.supplied
        known = settings["origins"] if is_usual else prelude.origins(supplied)
        for_tests = settings["for_tests"] if is_usual else prelude.for_tests(supplied)
        self.checked = check.checked(list(self.texts.values()), lambda name: name.encode() in reaper.tests, known)
        self.reason = self.checked.reason if settings["is_frozen"] else "its interpreter cannot be frozen"
        self.tools = {"supplied": for_tests, "session": settings["session"]}

    def results(self, cases):
        """The results of a run of cases; a program that has ended is begun anew behind the test in which it did."""
        progress = Progress(len(cases))
        while left := progress.unfinished():
            seen = self._seen(cases, left)
            if reason := next((str(one["not_allowed"]) for one in seen.reports if "not_allowed" in one), ""):
                self.reason, progress = reason, Progress(len(cases))
                continue
            progress.take(seen.reports, seen.status, seen.detail)
        return progress.results()

    def _seen(self, cases, left):
        """What one process of tests has written.

        Args:
            cases: cases of the run.
            left: numbers of those without a result, and how many of their tests were run.
        """
        nonce = os.urandom(16).hex()
        reaper = self.reaper

        def tests():
            given = json.loads(reaper.tests)
            fresh_main()
            found = []
            for at, skip in left:
                text, expects, own = given["cases"][cases[at]["place"]]
                found.append({"number": at, "skip": skip, "code": given["texts"][text], "expects": expects, "own": own})
            return found

        def together():
            local_program.run_tests(
                self.texts, tests(), self.checked, for_program=reaper.supplied, report=reporter(nonce), **self.tools
            )
            os._exit(0)

        def beside_it():
            remote_program.run_tests(
                tests(), *CHANNEL, imports=self.checked.imports, report=reporter(nonce), **self.tools
            )
            os._exit(0)

        def program():
            reaper.enter_program()
            program_side.serve(reaper.codes, reaper.supplied, *CHANNEL)

        if not self.reason:
            return reaper.processes.run(together, nonce=nonce, num_cases=MANY)
        to_program, to_tests = os.pipe(), os.pipe()
        return reaper.processes.run(
            beside_it, nonce=nonce, num_cases=MANY, channel=(to_tests[0], to_program[1]),
            beside=(program, (to_program[0], to_tests[1])),
        )  # fmt: skip
