"""Grades a response by running its program on the row's tests, in a sandbox.

``gtpo_megatron.rewards.code_tests:code_tests`` is 1 if all tests pass, else 0; ``...:share_of_tests`` is the fraction
that passes. In both, a response is correct if all pass. docs/rewards.md has the shapes of tests.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.program_block import program_in
from gtpo_megatron.rewards.program_tests import ProgramTest, ProgramTests, tests_of
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.sandbox.protocol import CaseResult, Job, Limits

RELATIVE_TOLERANCE = ABSOLUTE_TOLERANCE = 1e-6
"""Of floating-point numbers, in outputs and returned values."""

SHARE_OF_LIMIT = 0.8
"""Fraction of the row's time that its program may take, compiling included."""

SHOWN_TESTS = 24
"""Tests whose verdicts the report shows."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def complaint(columns: Mapping[str, Any]) -> str:
    """Why a row cannot be graded; "" if it can."""
    try:
        tests_of(columns)
    except DataError as error:
        return str(error)
    return ""


@states(success_threshold=1.0, complaint=complaint, needs_sandbox=True)
def code_tests(request: RewardRequest) -> Reward:
    """1 if the program passes all tests, else 0; parts and info say which tests it passed.

    Raises:
        DataError: the row has no tests.
        SandboxError: the program could not be run.
    """
    reward = share_of_tests(request)
    return Reward(float(reward.value == 1.0), reward.parts, reward.info)


@states(success_threshold=1.0, complaint=complaint, needs_sandbox=True)
def share_of_tests(request: RewardRequest) -> Reward:
    """The fraction of tests that the program passes.

    Raises:
        DataError: the row has no tests.
        SandboxError: the program could not be run.
    """
    tests = tests_of(request.columns)
    program = program_in(request.response, tests.language)
    if not program:
        return _reward(0.0, has_code=False, runs=False, info={"program": "the response has none"})
    outcome = request.sandbox.run(_job(program, tests, request.limit_s))
    if outcome.compile_error:
        return _reward(0.0, has_code=True, runs=False, info={"compiler": outcome.compile_error})
    verdicts = [verdict(test, result) for test, result in zip(tests.tests, outcome.results, strict=True)]
    share = sum(one == "passed" for one in verdicts) / len(verdicts)
    runs = any(result.status == "ok" for result in outcome.results)
    return _reward(share, has_code=True, runs=runs, info={"tests": verdicts[:SHOWN_TESTS]})


def verdict(test: ProgramTest, result: CaseResult) -> str:
    """``passed``, or why not."""
    if result.status != "ok":
        return f"{result.status}: {result.detail[:120]}" if result.detail else result.status
    if test.output is not None:
        return "passed" if same_output(test.output, result.output) else "wrong output"
    if test.value is not None:
        return "passed" if _same_value(json.loads(test.value), _value(result.output)) else "wrong value"
    return "passed"


def same_output(expected: str, given: str) -> bool:
    """Whether two outputs are equal but for white space at the ends of lines, and floats within the tolerance."""
    wanted, found = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, given))
    if wanted == found:
        return True
    wanted_words, found_words = ([line.split() for line in lines] for lines in (wanted, found))
    return [len(line) for line in wanted_words] == [len(line) for line in found_words] and all(
        _same_word(one, other)
        for line, other_line in zip(wanted_words, found_words, strict=True)
        for one, other in zip(line, other_line, strict=True)
    )


def _same_word(expected: str, given: str) -> bool:
    if expected == given:
        return True
    if not ("." in expected or "e" in expected.lower()):  # an integer must be given exactly
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given)):
        return False
    return _is_close(float(expected), float(given))


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _value(text: str) -> Any:
    """A returned value; one that is no JSON equals nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return float("nan")


def _same_value(expected: Any, given: Any) -> bool:
    """Equality of JSON values with tolerance of floats; a list of one value also stands for the value itself."""
    if _equal(expected, given):
        return True
    return (
        isinstance(expected, list) and len(expected) == 1 and not isinstance(given, list) and _equal(expected[0], given)
    )


def _equal(expected: Any, given: Any) -> bool:
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, int | float) and isinstance(given, int | float):
        return expected == given or (isinstance(expected, float) and _is_close(expected, float(given)))
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(map(_equal, expected, given))
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(_equal(expected[key], given[key]) for key in expected)
    return type(expected) is type(given) and bool(expected == given)


def _job(program: str, tests: ProgramTests, limit_s: float) -> Job:
    """The program with its stub if it lacks it, and the tests' cases; limits are within the row's."""
    if tests.stub and tests.entry_point and f"def {tests.entry_point}" not in program:
        program = f"{tests.stub.rstrip()}\n{program}"
    elif tests.stub:
        imports = [line for line in tests.stub.splitlines() if line.startswith(("import ", "from "))]
        program = "\n".join([*imports, program])
    share = SHARE_OF_LIMIT * limit_s
    total_s = share if tests.language == "python" else share / 2
    limits = Limits(
        case_s=min(tests.case_s or Limits().case_s, total_s), total_s=total_s, compile_s=share - total_s or 1.0
    )
    language = cast("Literal['python', 'cpp']", tests.language)
    return Job(source=program, language=language, cases=tuple(test.case for test in tests.tests), limits=limits)


def _reward(share: float, *, has_code: bool, runs: bool, info: Mapping[str, Any]) -> Reward:
    return Reward(share, {"tests_passed": share, "has_code": float(has_code), "runs": float(runs)}, info)
