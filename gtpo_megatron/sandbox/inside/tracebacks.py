"""What an exception says, and where in a program or in its tests it was raised.

Runs inside the sandbox; needs the standard library only.
"""

PROGRAM, TESTS = "program.py", "tests.py"
"""Names of the files of which the code of programs and tests seems to be."""

DETAIL_BYTES = 2000
"""Bytes kept of an exception's text."""


class ProgramExit(SystemExit):
    """The program in another process asked to leave."""


def places(trace):
    """File and line of each frame of a traceback, from the outermost call on."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def lines_in(file, error):
    """The lines of a file that an exception has passed."""
    return [line for name, line in places(error.__traceback__) if name == file]


def one_line(error):
    """An exception in a line, with the line of the program, or else of the tests."""
    in_program, in_tests = lines_in(PROGRAM, error), lines_in(TESTS, error)
    place = f" (line {in_tests[-1]} of the tests)" if in_tests else ""
    if line := getattr(error, "program_line", 0) or (in_program or [0])[-1]:  # the former crossed from its process
        place = f" (line {line})"
    if isinstance(error, SyntaxError) and error.lineno and error.filename == TESTS:
        place = f" (line {error.lineno} of the tests)"
    return f"{type(error).__name__}: {error}{place}"[:DETAIL_BYTES]
