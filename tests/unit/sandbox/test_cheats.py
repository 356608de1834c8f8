"""No cheat earns a test: the reader sends it apart, or what it does has no effect."""

import pytest

from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits
from tests.sandboxes import needs_bubblewrap
from tests.unit.sandbox.programs import programs

KINDS = ("changes", "reaches", "answers", "ends")
CHEATS = {f"{kind}: {name}": source for kind in KINDS for name, (source, _) in programs(f"cheats_{kind}").items()}
CHECKS = [text for text, _ in programs("checks").values()]


@pytest.fixture(scope="module", params=["unsafe", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


def ran(sandbox, source, *tests):
    cases = tuple(Case(code=one, num_tests=one.count("def test_")) for one in tests)
    return sandbox.run(Job(source=source, language="python", cases=cases, limits=Limits(case_s=20.0, total_s=100.0)))


def statuses(result):
    return [one.status for one in result.tests or (result,)]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_no_test(sandbox, name):
    outcome = ran(sandbox, CHEATS[name], *CHECKS)
    earned = [test for test, one in zip(CHECKS, outcome.results, strict=True) if "error" not in statuses(one)]
    assert earned == [], (outcome.apart, outcome.results)


def test_the_same_checks_pass_on_a_right_program(sandbox):
    source = "def f(x): return x * x if not hasattr(x, 'assertEqual') else 0"
    outcome = ran(
        sandbox,
        source,
        *(one for one in CHECKS if "with f" not in one and "ExitStack" not in one and "startswith" not in one),
    )
    assert outcome.apart == ""
    assert [set(statuses(one)) for one in outcome.results] == [{"ok"}] * (len(CHECKS) - 4), outcome


def test_there_are_enough_cheats():
    assert len(CHEATS) > 150
