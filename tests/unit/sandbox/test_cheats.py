"""No cheat earns a test: the static check gives it a process of its own, or what it does has no effect."""

import pytest

from gtpo_megatron.sandbox import server
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits
from tests.sandboxes import needs_bubblewrap
from tests.unit.rewards.test_code_tests import fenced, graded
from tests.unit.sandbox.programs import one_in_four, programs

KINDS = ("changes", "reaches", "answers", "ends")
CHEATS = {f"{kind}: {name}": source for kind in KINDS for name, (source, _) in programs(f"cheats_{kind}").items()}
FOUND = programs("cheats_found")
CHECKS = [text for text, _ in programs("checks").values()]


@pytest.fixture(scope="module")
def unsafe():
    made = UnsafeSandbox()
    yield made
    made.close()


@pytest.fixture(scope="module")
def bubblewrap():
    made = BubblewrapSandbox()
    yield made
    made.close()


def ran(sandbox, source, *tests):
    cases = tuple(Case(code=one, num_tests=one.count("def test_")) for one in tests)
    return sandbox.run(Job(source=source, language="python", cases=cases, limits=Limits(case_s=20.0, total_s=100.0)))


def statuses(result):
    return [one.status for one in result.tests or (result,)]


def check_earns_nothing(sandbox, source):
    outcome = ran(sandbox, source, *CHECKS)
    earned = [test for test, one in zip(CHECKS, outcome.results, strict=True) if "error" not in statuses(one)]
    assert earned == [], (outcome.separate_process, outcome.results)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in_four(CHEATS, others=pytest.mark.slow))
def test_a_cheat_earns_no_test(unsafe, name):
    check_earns_nothing(unsafe, CHEATS[name])


@pytest.mark.parametrize("name", one_in_four(FOUND, others=pytest.mark.slow))
def test_a_cheat_earns_none_of_its_own_tests(unsafe, name):
    source, tests = FOUND[name]
    assert graded(unsafe, fenced(source), {"tests": tests}).value == 0.0


ENDS = [name for name in CHEATS if name.startswith("ends")]


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.parametrize("name", one_in_four(ENDS, others=pytest.mark.slow))
def test_what_ends_or_writes_earns_no_test_within_bubblewrap_either(bubblewrap, name):
    check_earns_nothing(bubblewrap, CHEATS[name])


def test_the_same_checks_pass_on_a_right_program(unsafe):
    source = "def f(x): return x * x if not hasattr(x, 'assertEqual') else 0"
    tests = [one for one in CHECKS if not any(word in one for word in ("with f", "startswith", "ExitStack"))]
    outcome = ran(unsafe, source, *tests)
    assert outcome.separate_process == ""
    assert [set(statuses(one)) for one in outcome.results] == [{"ok"}] * (len(CHECKS) - 4), outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers: eq", "changes: builtins by a function", "ends: a skip of pytest"])
def test_the_static_check_is_what_keeps_them_from_it(monkeypatch, name):
    """A cheat in which nothing is found earns something: these tests can fail."""
    unchecked = "_checked = checked\ndef checked(*given):\n    found = _checked(*given)\n    found.reason = ''\n"
    name_of_check = f"{server.PACKAGE}.static_check.check"
    text = f"{server.MODULES[name_of_check]}\n{unchecked}    return found\n"
    monkeypatch.setitem(server.MODULES, name_of_check, text)
    sandbox = UnsafeSandbox()
    outcome = ran(sandbox, CHEATS[name], *CHECKS)
    sandbox.close()
    assert any("error" not in statuses(one) for one in outcome.results)


def test_there_are_enough_cheats():
    assert len(CHEATS) > 150
    assert len(FOUND) > 100
