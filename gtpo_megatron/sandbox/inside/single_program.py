"""One case of a program in one process, as an HTTP service runs it; what became of it is printed behind a mark.

Where the program needs a process of its own, that is a child. Runs inside a service; needs the standard library, and
for tests in Python pytest.
"""

import json
import os
import signal

from gtpo_megatron.sandbox.inside import prelude, program, text_modules
from gtpo_megatron.sandbox.inside.same_process import immutable_classes, local_program
from gtpo_megatron.sandbox.inside.separate_process import program_side, remote_program
from gtpo_megatron.sandbox.inside.static_check import check
from gtpo_megatron.sandbox.inside.testing import pytest_session

NOT_ALLOWED = 77
"""Exit status of a process in which a program did what needs a process of its own."""


def main(given):
    """Runs the case, and leaves.

    Args:
        given: ``source``, ``before``, ``prelude`` and ``modules`` of a job, its one ``case``, and the ``mark``.
    """
    supplied = {} if given["prelude"] == "" else prelude.names(given["prelude"])
    codes, case = program.compiled(given), given["case"]
    text_modules.offer(given["modules"])
    if case["stdin"] is not None:
        program.run_as_main(codes, supplied)

    def report(fields):
        os.write(1, f"{given['mark']}{json.dumps(fields)}\n".encode())

    if case["function"]:
        program.load_and_call(codes, [case], report, supplied)
    test(codes, given, supplied, report)
    os._exit(0)


def test(codes, given, supplied, report):
    """Runs the tests of the case."""
    case = given["case"]
    texts = {"stub.py": given["before"], "program.py": given["source"]}
    cases = [{"number": 0, "skip": 0, "code": case["code"], "expects": case["num_tests"] > 0, "own": case["own"]}]
    session = pytest_session.prepared(os.getcwd()) if "est" in case["code"] else ""  # no test has another name
    tools = {"supplied": prelude.for_tests(supplied), "session": session}
    checked = check.checked(list(texts.values()), lambda name: name in case["code"], prelude.origins(supplied))
    if not checked.reason and local_program.freeze():
        child = os.fork()
        if child == 0:
            program.fresh_main()
            local_program.run_tests(
                texts, cases, checked, for_program=supplied,
                report=lambda fields: os._exit(NOT_ALLOWED) if "not_allowed" in fields else report(fields), **tools,
            )  # fmt: skip
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != NOT_ALLOWED:
            return
    to_program, to_tests = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            for descriptor in (to_program[1], to_tests[0]):
                os.close(descriptor)
            for one in (case, given, cases, texts):  # what is not the program's
                one.clear()
            immutable_classes.thaw()
            program_side.serve(codes, supplied, to_program[0], to_tests[1])
        finally:
            os._exit(1)
    for descriptor in (to_program[0], to_tests[1]):
        os.close(descriptor)
    program.fresh_main()
    remote_program.run_tests(cases, to_tests[0], to_program[1], imports=checked.imports, report=report, **tools)
    os.kill(child, signal.SIGKILL)
