"""Two comparisons of outputs and values: ours, and LiveCodeBench's, whose own grader said what stands here."""

import json
import re
from pathlib import Path

import pytest

import gtpo_megatron
from gtpo_megatron.rewards.outputs import compared
from gtpo_megatron.rewards.program_tests import LIVECODEBENCH, ProgramTest
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.protocol import Case
from tests.unit.rewards.test_code_tests import fenced, graded

PRINTED = [  # expected, printed, right by LiveCodeBench's grader, right by ours
    ("3", "3.0", True, False),
    ("1e3", "1000", True, True),
    ("0.5", "0.5000001", False, True),
    ("1_000", "1000", True, False),
    ("1", "\n\n1", True, False),
    ("1\n2", "1\n\n2", False, False),
    ("1\n2", "1\n2\n\n", True, True),
    ("1\n2", " 1 \n 2", True, True),
    ("a b", "a  b", False, True),
    ("1 2", "1  2", True, True),
    ("yes", "Yes", False, False),
    ("nan", "nan", True, True),
    ("nan 1", "nan  1", False, True),
    ("sNaN", "sNaN 1", False, False),
    ("3", "x", False, False),
    ("9" * 5000, "9" * 5000 + ".0", True, False),
]
RETURNED = [  # expected as JSON, expression that is returned, right by LiveCodeBench's grader, right by ours
    ("3", "3.0", True, True),
    ("true", "1", True, False),
    ("1", "True", True, False),
    ("[true, 2.0]", "[1, 2]", True, False),
    ("0.3", "0.1 + 0.2", False, True),
    ("[1, 2]", "(1, 2)", True, True),
    ("[[1, 2]]", "[(1, 2)]", False, True),
    ("[1, 2]", "(y for y in (1, 2))", False, True),
    ("[1, 2]", "map(int, '12')", False, True),
    ("[1, 2]", "{1, 2}", False, True),
    ("[1, 2]", "deque([1, 2])", False, True),
    ("[5]", "5", False, True),
    ('{"1": 2}', "{1: 2}", False, True),
    ('{"a": [1]}', "defaultdict(int, a=[1])", True, True),
    ("null", "None", True, True),
    ("2", "decimal.Decimal(2)", True, True),
    ("12345678901234567890123456789012345", "decimal.Decimal('12345678901234567890123456789012345')", True, True),
    ("0.5", "fractions.Fraction(1, 2)", True, True),
    ("0.1", "decimal.Decimal('0.1')", False, True),
    ("NaN", "float('nan')", False, True),
    ("[NaN]", "[float('nan')]", False, True),
    ("0.5", "float('nan')", False, False),
    ("NaN", "object()", False, False),
    ("2", "2 + 0j", True, False),
    ("[1, 2]", "zip([1], [2])", False, False),
    ("[[1, 2]]", "zip([1], [2])", False, True),
    ('"a"', "'a'", True, True),
    ("1", "'1'", False, False),
]

DOCUMENT = Path(gtpo_megatron.__file__).parents[1] / "docs/evaluation.md"
ROW = re.compile(
    r"^\| (?P<kind>print|return) `(?P<wanted>[^`]+)` \| `(?P<given>[^`]+)` \| (?P<both>[01] \| [01]) \|", re.M
)


@pytest.mark.parametrize(("expected", "printed", "theirs", "ours"), PRINTED)
def test_outputs(expected, printed, theirs, ours):
    for comparison, is_right in ((LIVECODEBENCH, theirs), ("", ours)):
        test = ProgramTest(case=Case(stdin=""), output=expected, comparison=comparison)
        assert (compared(test, printed) == "passed") is is_right


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


SHOWN = 24
"""Tests that a report shows."""


def passes(sandbox, returned, columns):
    """Which of the expressions are what is expected, each returned by a call."""
    program = "".join(f"def f{at}(): return {text}\n" for at, (_, text) in enumerate(returned))
    response = fenced(f"{program}def f(x): return globals()[f'f{{x}}']()")
    found = []
    for first in range(0, len(returned), SHOWN):
        places = range(first, min(first + SHOWN, len(returned)))
        tests = {"fn_name": "f", "inputs": [[at] for at in places], "outputs": [returned[at][0] for at in places]}
        # as text, since nan is no value of a row
        found += graded(sandbox, response, {"tests": json.dumps(tests), **columns}).info["tests"]
    return [one == "passed" for one in found]


@pytest.mark.parametrize("place", [2, 3])
def test_returned_values(sandbox, place):
    columns = {"comparison": LIVECODEBENCH} if place == 2 else {}
    returned = [(json.loads(row[0]), row[1]) for row in RETURNED]
    found = passes(sandbox, returned, columns)
    assert {row[:2]: one for row, one in zip(RETURNED, found, strict=True)} == {row[:2]: row[place] for row in RETURNED}


def test_the_table_of_docs_is_these(sandbox):
    known = {("print", one, other): (theirs, ours) for one, other, theirs, ours in PRINTED}
    known |= {("return", one, other): (theirs, ours) for one, other, theirs, ours in RETURNED}
    rows = list(ROW.finditer(DOCUMENT.read_text("utf-8")))
    assert len(rows) > 10
    for row in rows:
        wanted, given = (row[name].replace("⏎", "\n") for name in ("wanted", "given"))
        assert known[row["kind"], wanted, given] == tuple(one == "1" for one in row["both"].split(" | ")), row[0]


def test_an_unknown_comparison_is_refused(sandbox):
    with pytest.raises(Exception, match="comparison is 'mine'; expected livecodebench"):
        graded(sandbox, fenced("print(1)"), {"tests": [{"input": "", "output": "1"}], "comparison": "mine"})
