"""One case of a program in a process of its own, as an HTTP service runs it; what became of it is printed after a mark.

Runs inside a service; needs the standard library only. The program is a child of the process with the tests.
"""

import json
import os
import signal

from gtpo_megatron.sandbox.inside import exam, prelude, program


def main(given):
    """Runs the case, and leaves.

    Args:
        given: ``source``, ``before`` and ``prelude`` of a job, its one ``case``, and the ``mark``.
    """
    supplied = {} if given["prelude"] == "" else prelude.names(given["prelude"])
    code = tuple(
        compile(given[name], f"{name}.py".replace("source", "program"), "exec", dont_inherit=True)
        for name in ("before", "source")
    )
    case = given["case"]
    if case["stdin"] is not None:
        program.run_as_main(code, supplied)

    def report(status, detail="", output=""):
        said = json.dumps({"status": status, "detail": detail, "output": output})
        os.write(1, f"{given['mark']}{said}\n".encode())

    if case["function"]:
        program.load_and_do(code, [case], report, supplied)
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            for descriptor in (pipes[0][1], pipes[1][0]):
                os.close(descriptor)
            case.clear()
            given.clear()
            program.offer(code, supplied, pipes[0][0], pipes[1][1])
        finally:
            os._exit(1)
    for descriptor in (pipes[0][0], pipes[1][1]):
        os.close(descriptor)
    program.fresh_main()
    exam.examine([case], prelude.for_tests(supplied), pipes[1][0], pipes[0][1], report)
    os.kill(child, signal.SIGKILL)
    os._exit(0)
