"""Right programs of every shape pass the tests that plain Python passes, and empty ones in their place do not."""

import ast

import pytest

from gtpo_megatron.rewards.code_tests import code_tests, complaint
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tests.unit.rewards.test_code_tests import fenced, graded
from tests.unit.sandbox.programs import one_in_four, programs

SHAPES, FOUND = programs("shapes"), programs("shapes_found")
SEPARATE = 6
"""Those of them that have a process of their own: what of the tests can be wrong then is known, and is none of this."""


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


def empty(program):
    """Every function and class of a program, doing nothing."""
    names = [one for one in ast.parse(program).body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    return "\n".join(
        f"class {one.name}: pass" if isinstance(one, ast.ClassDef) else f"def {one.name}(*a, **k): pass"
        for one in names
    )


@pytest.mark.parametrize("name", one_in_four(SHAPES, others=pytest.mark.slow))
def test_a_right_program_passes_and_an_empty_one_does_not(sandbox, name):
    program, tests = SHAPES[name]
    assert complaint({"tests": tests}) == ""
    right = graded(sandbox, fenced(program), {"tests": tests}, code_tests)
    assert right.value == 1.0, right.info
    wrong = graded(sandbox, fenced(empty(program)), {"tests": tests}, code_tests)
    assert wrong.value == 0.0, wrong.info


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in_four(FOUND, others=pytest.mark.slow))
def test_a_right_program_of_a_further_shape_passes(sandbox, name):
    program, tests = FOUND[name]
    found = graded(sandbox, fenced(program), {"tests": tests}, code_tests)
    assert found.value == 1.0, found.info


@pytest.mark.slow
def test_most_of_them_share_the_interpreter_of_their_tests(sandbox):
    reasons = {}
    for name, (program, tests) in SHAPES.items():
        found = graded(sandbox, fenced(f"{program}\nraise ValueError"), {"tests": tests})
        reasons[name] = found.info.get("separate_process", "")
    assert sum(bool(one) for one in reasons.values()) <= SEPARATE, {name: one for name, one in reasons.items() if one}
