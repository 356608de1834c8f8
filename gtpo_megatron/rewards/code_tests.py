"""Grades a response by running its program on the row's tests, in a sandbox.

``gtpo_megatron.rewards.code_tests:code_tests`` is 1 if all tests pass, else 0; ``...:share_of_tests`` is the fraction
that passes. In both, a response is correct if all pass. docs/rewards.md has the shapes of tests.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.program_block import program_in
from gtpo_megatron.rewards.program_tests import ProgramTest, ProgramTests, tests_of
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.sandbox.protocol import CaseResult, Job, Limits
from gtpo_megatron.untrusted.text import printable

RELATIVE_TOLERANCE = ABSOLUTE_TOLERANCE = 1e-6
"""Of floating-point numbers, in outputs and returned values."""

SHARE_OF_LIMIT = 0.8
"""Fraction of the row's time that its program may take, compiling included."""

SHOWN_TESTS = 24
"""Tests whose verdicts the report shows."""

SKIPPED = "skipped"

READ_ROWS = 16
"""Rows whose tests are kept; the responses of a group follow one another and share their row."""

_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
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
    tests = _tests_of(request.columns_json)
    program = program_in(request.response, tests.language)
    if not program:
        return _reward(0.0, has_code=False, runs=False, info={"program": "the response has none"})
    outcome = request.sandbox.run(_job(program, tests, request.limit_s))
    if outcome.compile_error:
        return _reward(0.0, has_code=True, runs=False, info={"compiler": outcome.compile_error})
    verdicts = _verdicts(tests, outcome.results)
    counted = [one for one in verdicts if one != SKIPPED]
    if not counted:
        raise DataError("all tests of the row are skipped: no program could earn it")
    share = sum(one == "passed" for one in counted) / len(counted)
    runs = any(result.status == "ok" for result in outcome.results)
    info = {"tests": verdicts[:SHOWN_TESTS]} | _missing(outcome.results)
    return _reward(share, has_code=True, runs=runs, info=info)


@lru_cache(maxsize=READ_ROWS)
def _tests_of(columns_json: str) -> ProgramTests:
    """The tests of a row; nobody changes them, so the responses of a group share them."""
    return tests_of(json.loads(columns_json))


def _verdicts(tests: ProgramTests, results: Sequence[CaseResult]) -> list[str]:
    """``passed``, ``skipped``, or why not, per test.

    A test in Python that used nothing of the program has passed only if others have used it: else none has tested it.
    """
    pairs = list(zip(tests.tests, results, strict=True))
    is_tested = any(result.status == "ok" for test, result in pairs if test.case.code)
    return ["passed" if result.status == "unused" and is_tested else verdict(test, result) for test, result in pairs]


def _missing(results: Sequence[CaseResult]) -> dict[str, str]:
    """Values of the report for a package that the sandbox lacks."""
    for result in results:
        if result.status != "ok" and (found := _NO_MODULE.search(result.detail)):
            return {"packages": f"{printable(found[1])} is not in the sandbox; reward.packages says what is"}
    return {}


def verdict(test: ProgramTest, result: CaseResult) -> str:
    """``passed``, or why not."""
    if result.status == "skipped":
        return SKIPPED if test.case.code else "error"  # only tests themselves skip
    if result.status == "unused":
        return "the test used nothing of the program"
    if result.status != "ok":
        return f"{result.status}: {result.detail[:120]}" if result.detail else result.status
    if test.output is not None:
        return "passed" if same_output(test.output, result.output) else "wrong output"
    if test.value is not None:
        return "passed" if _same_value(json.loads(test.value), _value(result.output)) else "wrong value"
    return "passed"


def same_output(expected: str, given: str) -> bool:
    """Whether two outputs have the same words line by line, with floats within the tolerance.

    White space between words does not count, as in most contests' checkers; empty lines do, but for the last ones.
    """
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
    try:
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def _value(text: str) -> Any:
    """A returned value; one that is no JSON equals nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return float("nan")


def _same_value(expected: Any, given: Any) -> bool:
    """Equality of JSON values with tolerance of floats; a list of one value also stands for the value itself.

    TACO and APPS write some returned values so, lists among them.
    """
    return _equal(expected, given) or (isinstance(expected, list) and len(expected) == 1 and _equal(expected[0], given))


def _equal(expected: Any, given: Any) -> bool:
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, int | float) and isinstance(given, int | float):
        return expected == given or (isinstance(expected, float) and _is_close(expected, given))
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(map(_equal, expected, given))
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(_equal(expected[key], given[key]) for key in expected)
    return type(expected) is type(given) and bool(expected == given)


def _job(program: str, tests: ProgramTests, limit_s: float) -> Job:
    """The program with what it lacks of its stub, and the tests' cases; limits are within the row's."""
    program, before = _completed(program, tests)
    share = SHARE_OF_LIMIT * limit_s
    total_s = share if tests.language == "python" else share / 2
    limits = Limits(
        case_s=min(tests.case_s or Limits().case_s, total_s), total_s=total_s, compile_s=share - total_s or 1.0
    )
    language = cast("Literal['python', 'cpp']", tests.language)
    cases = tuple(test.case for test in tests.tests)
    return Job(source=program, language=language, cases=cases, limits=limits, before=before, prelude=tests.prelude)


def _completed(program: str, tests: ProgramTests) -> tuple[str, str]:
    """The program, behind its stub if it is the body only; and what of the stub is run before it, so that it has it."""
    if not tests.stub.strip() or tests.language != "python":
        return program, ""
    if program[:1] in (" ", "\t"):
        return f"{tests.stub.rstrip()}\n{program}", ""
    for end in ("", "\n    pass", "\n        pass"):
        try:
            tree = ast.parse(tests.stub.rstrip() + end)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        names = {tests.entry_point.partition("(")[0], tests.entry_point.rpartition(".")[2]}
        tree.body = [one for one in tree.body if not ({getattr(one, "name", "")} | _methods(one)) & names]
        return program, ast.unparse(tree)
    return program, "\n".join(one for one in tests.stub.splitlines() if one.startswith(("import ", "from ")))


def _methods(node: ast.stmt) -> set[str]:
    return (
        {one.name for one in node.body if isinstance(one, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else set()
    )


def _reward(share: float, *, has_code: bool, runs: bool, info: Mapping[str, Any]) -> Reward:
    return Reward(share, {"tests_passed": share, "has_code": float(has_code), "runs": float(runs)}, info)
