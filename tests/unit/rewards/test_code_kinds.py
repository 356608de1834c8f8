"""Programs graded right and wrong, a table by kind: names that graders supply, tests in functions, tricks, packages."""

import json

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.code_tests import code_tests
from gtpo_megatron.rewards.program_tests import tests_of as program_tests_of
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.written_tests import cases_of_text
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.protocol import Case, Job
from gtpo_megatron.sandbox.unsafe import UnsafeSandbox
from tests.sandboxes import needs_bubblewrap

pytestmark = pytest.mark.xdist_group("sandbox")

SQUARE, ZERO = "def f(x): return x * x", "def f(x): return 0"
ONE_TEST = {"tests": ["assert f(2) == 4"]}


def in_solution(starter, function, arguments, output):
    """A row of LiveCodeBench."""
    test = {"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(output), "testtype": "functional"}
    return {
        "public_test_cases": json.dumps([test]),
        "metadata": json.dumps({"func_name": function}),
        "starter_code": starter,
    }


TOTAL = in_solution("class Solution:\n    def total(self, nums: List[int]) -> int:\n        ", "total", [[1, 2]], 3)
PYTEST = "import pytest\n\n\n"
UNITTEST = """\
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(2), 4)
"""

PROGRAMS = {
    # ---- names that those who set problems supply, which hide nothing
    "typing of the starter": (TOTAL, "class Solution:\n    def total(self, nums: List[int]): return sum(nums)", 1),
    "optional": (TOTAL, "class Solution:\n    def total(self, nums: Optional[List[int]]): return sum(nums)", 1),
    "collections": (TOTAL, "class Solution:\n    def total(self, nums): return sum(Counter(nums).elements())", 1),
    "heapq": (TOTAL, "class Solution:\n    def total(self, nums):\n        heapify(nums)\n        return sum(nums)", 1),
    "modules by name": (TOTAL, "class Solution:\n    def total(self, nums): return int(math.fsum(nums))", 1),
    "a list of nodes": (
        {"tests": ["assert f(3) == 3"]},
        "def f(n):\n    node = ListNode(n)\n    return node.val",
        1,
    ),
    "its own Counter": ({"tests": ["assert f() == 7"]}, "class Counter: x = 7\ndef f(): return Counter.x", 1),
    "its own gcd": ({"tests": ["assert f(2) == 2"]}, "def gcd(a, b): return 2\ndef f(x): return gcd(4, 6)", 1),
    "a function that tests call is the program's": ({"tests": ["assert gcd(4, 6) == 2"]}, "x = 1", 0),
    "the prelude may be another": (ONE_TEST | {"prelude": "def helper(x): return x * x"}, "f = helper", 1),
    "or none": (TOTAL | {"prelude": ""}, "class Solution:\n    def total(self, nums: List[int]): return sum(nums)", 0),
    # ---- from __future__ stays first
    "future imports before a stub's": (
        {
            "test": "def check(c):\n    assert c(2) == 4",
            "entry_point": "f",
            "stub": "from typing import List\ndef f(x):\n",
        },
        f"from __future__ import annotations\n{SQUARE}",
        1,
    ),
    # ---- tests in functions and classes are run
    "a test function, right": ({"tests": "def test_a():\n    assert f(2) == 4\n"}, SQUARE, 1),
    "a test function, wrong": ({"tests": "def test_a():\n    assert f(2) == 4\n"}, ZERO, 0),
    "the second of two, wrong": (
        {"tests": "def test_a():\n    assert f(0) == 0\ndef test_b():\n    assert f(2) == 4\n"},
        ZERO,
        0,
    ),
    "a class of tests, wrong": ({"tests": "class TestF:\n    def test_a(self):\n        assert f(2) == 4\n"}, ZERO, 0),
    "a TestCase, right": (
        {"tests": UNITTEST},
        SQUARE,
        1,
    ),
    "a TestCase, wrong": (
        {"tests": UNITTEST},
        ZERO,
        0,
    ),
    "setUp and subTest": (
        {
            "tests": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.x = 2\n"
            "    def test_a(self):\n        for y in (1, 2):\n            with self.subTest(y=y):\n"
            "                self.assertEqual(f(self.x), 4 if y else 0)\n"
        },
        ZERO,
        0,
    ),
    "unittest.main at the end": (
        {"tests": f"{UNITTEST}if __name__ == '__main__':\n    unittest.main()\n"},
        ZERO,
        0,
    ),
    "pytest.raises": (
        {"tests": f"{PYTEST}def test_a():\n    with pytest.raises(ValueError):\n        f(-1)\n"},
        "def f(x):\n    raise ValueError(x)",
        1,
    ),
    "pytest.raises, nothing raised": (
        {"tests": f"{PYTEST}def test_a():\n    with pytest.raises(ValueError):\n        f(-1)\n"},
        SQUARE,
        0,
    ),
    "parametrize": (
        {
            "tests": f"{PYTEST}@pytest.mark.parametrize('x, y', [(1, 1), (3, 9)])\n"
            "def test_a(x, y):\n    assert f(x) == y\n"
        },
        "def f(x): return 1",
        0,
    ),
    "from solution import": ({"tests": "from solution import f\ndef test_a():\n    assert f(2) == 4\n"}, SQUARE, 1),
    "import solution": ({"tests": "import solution\ndef test_a():\n    assert solution.f(2) == 4\n"}, ZERO, 0),
    "an uncalled check": ({"test": "def check(c):\n    assert c(2) == 4", "entry_point": "f"}, ZERO, 0),
    "tests under functional": (
        {"tests": {"functional": "def check(c):\n    assert c(2) == 4\ncheck(Solution().f)"}},
        "class Solution:\n    def f(self, x): return x * x",
        1,
    ),
    # ---- a program cannot earn by changing what the tests use
    "equal to everything": (
        ONE_TEST,
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
        0,
    ),
    "equal within a list": (
        {"tests": ["assert f(2) == [4]"]},
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return [A()]",
        0,
    ),
    "an int that is equal to everything": (
        ONE_TEST,
        "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(1)",
        0,
    ),
    "a patched builtin": (
        {"tests": ["assert sorted(f(2)) == [4]"]},
        "import builtins\nbuiltins.sorted = lambda *a, **k: [4]\ndef f(x): return 0",
        0,
    ),
    "a patched module": (
        {"tests": ["import math\nassert math.isclose(f(2), 4)"]},
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
        0,
    ),
    "a patched TestCase": (
        {"tests": UNITTEST},
        f"import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n{ZERO}",
        0,
    ),
    "leaving with status 0": (ONE_TEST, "import os\ndef f(x): os._exit(0)", 0),
    "SystemExit": (ONE_TEST, "def f(x): raise SystemExit(0)", 0),
    "leaving at once": (ONE_TEST, "import os\nos._exit(0)", 0),
    "an expected AssertionError": (ONE_TEST, "def f(x): raise AssertionError", 0),
    "skipping the tests": (
        {"tests": "def test_a():\n    assert f(2) == 4\n"},
        "import unittest\ndef f(x): raise unittest.SkipTest('no')",
        0,
    ),
    "reading the test's frame": (
        ONE_TEST,
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    return 4 if 'assert f(2) == 4' in str(frame.f_code.co_consts) else 0",
        0,
    ),
    # ---- packages of the sandbox
    "numpy": (ONE_TEST, "import numpy as np\ndef f(x): return int(np.square(x))", 1),
    "sortedcontainers": (
        ONE_TEST,
        "from sortedcontainers import SortedList\ndef f(x): return SortedList([x * x])[0]",
        1,
    ),
    "a package that is not there": (ONE_TEST, "import pandas\ndef f(x): return x * x", 0),
    # ---- legitimate programs stay right
    "a class of its own with __eq__": (
        {"tests": ["assert P(1, 2) == P(1, 2)", "assert P(1, 2) != P(2, 1)"]},
        "class P:\n    def __init__(self, *v): self.v = v\n    def __eq__(self, other): return self.v == other.v",
        1,
    ),
    "a list changed in place": ({"tests": ["x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"]}, "def f(x): x.sort()", 1),
    "a generator": ({"tests": ["assert list(f(3)) == [0, 1, 2]"]}, "def f(n): yield from range(n)", 1),
    "a dict of sets": ({"tests": ["assert f() == {1: {2, 3}}"]}, "def f(): return {1: {3, 2}}", 1),
    "an exception of its own": (
        {"tests": ["try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert 'bad' in str(e)"]},
        "class Bad(ValueError): pass\ndef f(x): raise Bad('bad')",
        1,
    ),
    "a function that takes a function": (
        {"tests": ["assert f(lambda x: x + 1, 2) == 3"]},
        "def f(g, x): return g(x)",
        1,
    ),
    "empty private tests": (
        {
            "public_test_cases": json.dumps([{"input": "1\n", "output": "1\n", "testtype": "stdin"}]),
            "private_test_cases": "[]",
        },
        "print(input())",
        1,
    ),
}


@pytest.fixture(scope="module", params=["unsafe", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_by_kind(sandbox, name):
    columns, program, right = PROGRAMS[name]
    request = RewardRequest(
        response=f"```python\n{program}\n```", columns_json=json.dumps(columns), limit_s=30.0, sandbox=sandbox
    )
    found = code_tests(request)
    assert found.value == right, found.info


def test_a_missing_package_is_named_in_the_info(sandbox):
    request = RewardRequest(
        response="```python\nimport pandas\ndef f(x): return 4\n```",
        columns_json=json.dumps(ONE_TEST),
        limit_s=30.0,
        sandbox=sandbox,
    )
    assert code_tests(request).info["packages"] == "pandas is not in the sandbox; reward.packages says what is"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def helper(): pass\n", "would run no test: it has the definitions of helper"),
        ("import math\n", "would run no test: it has no definition and no call"),
        ("class Helper:\n    def test_a(self): assert f(1)\n", "would run no test"),
        ("def check(candidate):\n    assert candidate(1)\n", "defines check\\(...\\) and never calls it"),
        ("def test_a(:\n", "its tests are no Python \\(line 1\\)"),
        ("import unittest\nunittest.main()\n", "would run no test"),
    ],
)
def test_a_text_that_tests_nothing_is_refused_when_it_is_read(text, why):
    with pytest.raises(DataError, match=why):
        cases_of_text(text, "row 3")


@pytest.mark.parametrize("empty", ["[]", "", None, "null", []])
def test_empty_private_tests_are_none(empty):
    public = json.dumps([{"input": "1\n", "output": "1\n", "testtype": "stdin"}])
    assert len(program_tests_of({"public_test_cases": public, "private_test_cases": empty}).tests) == 1


def test_lines_of_a_program_keep_their_numbers(sandbox):
    """Names are supplied beneath the program, not written in front of it."""
    job = Job(source="\n\n1 / 0", language="python", cases=(Case(stdin=""),))
    [result] = sandbox.run(job).results
    assert "line 3" in result.detail
