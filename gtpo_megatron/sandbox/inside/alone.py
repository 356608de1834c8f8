"""One case of a program in a process of its own, as an HTTP service runs it; what became of it is printed after a mark.

Runs inside a service; needs the standard library, and for tests in Python pytest. A program that is not plain is a
child of the process with its tests.
"""

import json
import os
import signal

from gtpo_megatron.sandbox.inside import apart, frozen, plain, prelude, program, pytest_session, row_modules, together

APART = 77
"""Exit status of a process in which a program has turned out to be one that must run apart."""


def main(given):
    """Runs the case, and leaves.

    Args:
        given: ``source``, ``before``, ``prelude`` and ``modules`` of a job, its one ``case``, and the ``mark``.
    """
    supplied = {} if given["prelude"] == "" else prelude.names(given["prelude"])
    code = tuple(
        compile(given[name], f"{name}.py".replace("source", "program"), "exec", dont_inherit=True)
        for name in ("before", "source")
    )
    case = given["case"]
    row_modules.offer(given["modules"])
    if case["stdin"] is not None:
        program.run_as_main(code, supplied)

    def say(said):
        os.write(1, f"{given['mark']}{json.dumps(said)}\n".encode())

    if case["function"]:
        report = lambda status, detail="", output="": say({"status": status, "detail": detail, "output": output})  # noqa: E731
        program.load_and_do(code, [case], report, supplied)
    test(code, given, supplied, say)
    os._exit(0)


def test(code, given, supplied, say):
    """Runs the tests of the case."""
    case = given["case"]
    cases = [{"number": 0, "skip": 0, "code": case["code"], "expects": case["num_tests"] > 0, "own": case["own"]}]
    session = pytest_session.prepared(os.getcwd()) if "est" in case["code"] else ""  # no test has another name
    reading = plain.read(
        [given["before"], given["source"]], lambda name: name in case["code"], prelude.origins(supplied)
    )
    for_tests = prelude.for_tests(supplied)
    if not reading.reason and together.freeze():
        texts = {"stub.py": given["before"], "program.py": given["source"]}
        child = os.fork()
        if child == 0:
            program.fresh_main()
            together.examine(
                texts, cases, imports=reading.imports, own_names=reading.own_names, for_program=supplied,
                supplied=for_tests, report=lambda said: say(said) if "apart" not in said else os._exit(APART),
                session=session,
            )  # fmt: skip
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != APART:
            return
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            for descriptor in (pipes[0][1], pipes[1][0]):
                os.close(descriptor)
            case.clear()
            given.clear()
            cases.clear()
            frozen.thaw()
            program.offer(code, supplied, pipes[0][0], pipes[1][1])
        finally:
            os._exit(1)
    for descriptor in (pipes[0][0], pipes[1][1]):
        os.close(descriptor)
    program.fresh_main()
    apart.examine(
        cases, pipes[1][0], pipes[0][1], imports=reading.imports, supplied=for_tests, report=say, session=session
    )
    os.kill(child, signal.SIGKILL)
