"""Grades a response by running its program on the row's tests, in a sandbox.

``gtpo_megatron.rewards.code_tests:code_tests`` is 1 if all tests pass, else 0; ``...:share_of_tests`` is the fraction
that passes. In both, a response is correct if all pass. docs/programs.md has the shapes of tests.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.function import states
from gtpo_megatron.rewards.outputs import compared
from gtpo_megatron.rewards.program_block import program_in
from gtpo_megatron.rewards.program_tests import ProgramTest, ProgramTests, tests_of
from gtpo_megatron.rewards.request import Reward, RewardRequest
from gtpo_megatron.rewards.stubs import completed
from gtpo_megatron.sandbox.protocol import CaseResult, Job, Limits, Outcome, TestResult
from gtpo_megatron.untrusted.text import printable

SHARE_OF_LIMIT = 0.8
"""Fraction of the row's time that its program may take, compiling included."""

SHARE_PER_TEST = 0.1
"""Fraction of ``reward.timeout_s`` that each test of a row pays for, so that a right program may have many."""

SHOWN_TESTS = 24
"""Tests whose verdicts the report shows."""

SKIPPED = "skipped"

READ_ROWS = 16
"""Rows whose tests are kept; the responses of a group follow one another and share their row."""

_NO_MODULE = re.compile(r"No module named '([\w.]+)'")


def complaint(columns: Mapping[str, Any]) -> str:
    """Why a row cannot be graded; "" if it can."""
    try:
        tests_of(columns)
    except DataError as error:
        return str(error)
    return ""


def limit_s(request: RewardRequest) -> float:
    """How long a row may take: its limit grows with its tests, and a benchmark's tests have all the time that it gives.

    Args:
        request: the row, with ``reward.timeout_s`` as its limit.
    """
    tests = _tests_of(request.columns_json)
    num_tests = sum(max(test.case.num_tests, 1) for test in tests.tests)
    total_s = num_tests * max(SHARE_PER_TEST * request.limit_s, tests.case_s if tests.comparison else 0.0)
    parts = 1 if tests.language == "python" else 2  # half of it is the compiler's
    return max(request.limit_s, parts * total_s / SHARE_OF_LIMIT)


@states(success_threshold=1.0, complaint=complaint, needs_sandbox=True, limit_s=limit_s)
def code_tests(request: RewardRequest) -> Reward:
    """1 if the program passes all tests, else 0; parts and info say which tests it passed.

    Raises:
        DataError: the row has no tests.
        SandboxError: the program could not be run.
    """
    reward = share_of_tests(request)
    return Reward(float(reward.value == 1.0), reward.parts, reward.info)


@states(success_threshold=1.0, complaint=complaint, needs_sandbox=True, limit_s=limit_s)
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
    runs = any(one.status == "ok" for one in _results_of_tests(outcome.results))
    notes = _package_note(outcome.results) | _time_note(outcome.results) | _process_note(outcome, counted)
    return _reward(share, has_code=True, runs=runs, info={"tests": verdicts[:SHOWN_TESTS]} | notes)


@lru_cache(maxsize=READ_ROWS)
def _tests_of(columns_json: str) -> ProgramTests:
    """The tests of a row; nobody changes them, so the responses of a group share them."""
    return tests_of(json.loads(columns_json))


def _results_of_tests(results: Sequence[CaseResult]) -> list[CaseResult | TestResult]:
    """The tests of all cases: those that pytest has collected, else the cases themselves."""
    return [one for result in results for one in result.tests or (result,)]


def _verdicts(tests: ProgramTests, results: Sequence[CaseResult]) -> list[str]:
    """``passed``, ``skipped``, or why not, per test.

    A test in Python that used nothing of the program has passed only if others have used it: else none has tested it.
    """
    pairs = list(zip(tests.tests, results, strict=True))
    is_tested = any(
        one.status == "ok" for one in _results_of_tests([result for test, result in pairs if test.case.code])
    )
    return [
        "passed" if one.status == "unused" and is_tested else verdict(test, one)
        for test, result in pairs
        for one in result.tests or (result,)
    ]


def _time_note(results: Sequence[CaseResult]) -> dict[str, str]:
    """Values of the report for a program that was ended by the time of all tests, none of which took too long."""
    if any(result.status == "out of time" for result in _results_of_tests(results)):
        return {"time": "its tests together took longer than the row may; raise reward.timeout_s"}
    return {}


def _package_note(results: Sequence[CaseResult]) -> dict[str, str]:
    """Values of the report for a package that the sandbox lacks."""
    for result in _results_of_tests(results):
        if result.status != "ok" and (found := _NO_MODULE.search(result.detail)):
            return {"packages": f"{printable(found[1])} is not in the sandbox; reward.packages says what is"}
    return {}


def _process_note(outcome: Outcome, verdicts: Sequence[str]) -> dict[str, str]:
    """Why a program that has failed had another process than its tests, where some things are not as in theirs."""
    reason = outcome.separate_process
    return {"separate_process": reason} if reason and set(verdicts) != {"passed"} else {}


def verdict(test: ProgramTest, result: CaseResult | TestResult) -> str:
    """``passed``, or why not."""
    if result.status == "skipped":
        return SKIPPED if test.case.code else "error"  # only tests themselves skip
    if result.status == "unused":
        return "the test used nothing of the program"
    if result.status != "ok":
        return f"{result.status}: {result.detail[:120]}" if result.detail else result.status
    output = "" if isinstance(result, TestResult) else result.output
    return compared(test, output)


def _job(program: str, tests: ProgramTests, limit_s: float) -> Job:
    """The program with what it lacks of its stub, and the tests' cases; limits are within the row's."""
    program, before = completed(program, tests.stub, tests.entry_point)
    share = SHARE_OF_LIMIT * limit_s
    total_s = share if tests.language == "python" else share / 2
    limits = Limits(
        case_s=min(tests.case_s or Limits().case_s, total_s), total_s=total_s, compile_s=share - total_s or 1.0
    )
    language = cast("Literal['python', 'cpp']", tests.language)
    cases = tuple(test.case for test in tests.tests)
    return Job(
        source=program, language=language, cases=cases, limits=limits, before=before, prelude=tests.prelude,
        modules=tests.modules,
    )  # fmt: skip


def _reward(share: float, *, has_code: bool, runs: bool, info: Mapping[str, Any]) -> Reward:
    """A reward whose parts are curves: what is not the program's fault alone is counted, too."""
    parts = {"tests_passed": share, "has_code": float(has_code), "runs": float(runs)}
    notes = {"out_of_time": "time", "lacks_package": "packages", "failed_in_separate_process": "separate_process"}
    parts |= {part: float(note in info) for part, note in notes.items()}
    return Reward(share, parts, info)
