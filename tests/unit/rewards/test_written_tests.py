"""Tests in Python: each shape of public sets tells a right program from a wrong one, or the row is refused."""

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards import program_tests
from gtpo_megatron.rewards.code_tests import code_tests, complaint
from gtpo_megatron.rewards.written_tests import cases_of_text
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tests.unit.rewards.test_code_tests import fenced, graded

RIGHT = """
def f(x):
    if x < 0:
        raise ValueError('negative')
    return x * x

class Solution:
    def f(self, x): return f(x)

class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
"""
WRONG = (
    "def f(x): return 0\nclass Solution:\n    def f(self, x): return 0\n"
    "class Stack:\n    def push(self, x): pass\n    def pop(self): return None\n"
)

SHAPES = {
    "assertions": "assert f(2) == 4\nassert f(3) == 9",
    "a loop": "for x, y in [(2, 4), (3, 9)]:\n    assert f(x) == y, (x, y)",
    "a function": "def test_a():\n    assert f(2) == 4",
    "an import": "from solution import f\n\ndef test_a():\n    assert f(2) == 4",
    "an import under another name": "import solution as s\ndef test_a():\n    assert s.f(2) == 4",
    "all of it": "from solution import *\ndef test_a():\n    assert f(2) == 4",
    "another module": "from main import f as g\ndef test_a():\n    assert g(2) == 4",
    "a class": "class TestF:\n    def test_a(self):\n        assert f(2) == 4",
    "a class with a set-up": "class TestF:\n    def setup_method(self):\n        self.x = 2\n"
    "    def test_a(self):\n        assert f(self.x) == 4",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        self.assertEqual(f(2), 4)",
    "unittest with a set-up": "from unittest import TestCase, main\nclass T(TestCase):\n    def setUp(self):\n"
    "        self.s = Stack()\n    def test_a(self):\n        self.s.push(4)\n"
    "        self.assertEqual(self.s.pop(), 4)\n"
    "if __name__ == '__main__':\n    main()",
    "unittest with subtests": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        for x in (1, 2):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), x * x)",
    "unittest's raises": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n"
    "        with self.assertRaises(ValueError):\n            f(-1)",
    "unittest, inherited": "import unittest\nclass Base(unittest.TestCase):\n    def test_a(self):\n"
    "        self.assertEqual(f(2), 4)\nclass T(Base):\n    pass",
    "unittest, asynchronous": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test_a(self):\n        self.assertEqual(f(2), 4)",
    "raises": "import pytest\ndef test_a():\n    with pytest.raises(ValueError, match='nega'):\n        f(-1)",
    "raises and its value": "import pytest\ndef test_a():\n    with pytest.raises(ValueError) as info:\n        f(-1)\n"
    "    assert str(info.value) == 'negative'",
    "parameters": "import pytest\n@pytest.mark.parametrize('x, y', [(2, 4), (3, 9)])\ndef test_a(x, y):\n"
    "    assert f(x) == y",
    "parameters twice": "import pytest\n@pytest.mark.parametrize('x', [1, 2])\n@pytest.mark.parametrize('k', [0, 1])\n"
    "def test_a(x, k):\n    assert f(x) * k == x * x * k",
    "parameters with marks": "import pytest\n@pytest.mark.parametrize('x', [pytest.param(2, id='two')])\n"
    "class TestF:\n    def test_a(self, x):\n        assert f(x) == 4",
    "a fixture": "import pytest\n@pytest.fixture\ndef x():\n    yield 2\ndef test_a(x):\n    assert f(x) == 4",
    "a fixture of a fixture": "import pytest\n@pytest.fixture()\ndef x():\n    return 2\n"
    "@pytest.fixture(params=[1, 2])\ndef y(x, request):\n    return x * request.param\n"
    "def test_a(y):\n    assert f(y) == y * y",
    "approx": "from pytest import approx\ndef test_a():\n    assert f(2) == approx(4.0)",
    "built-in fixtures": "def test_a(capsys, monkeypatch, tmp_path):\n    print(f(2))\n"
    "    assert capsys.readouterr().out == '4\\n'",
    "asynchronous": "import pytest\n@pytest.mark.asyncio\nasync def test_a():\n    assert f(2) == 4",
    "check": "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)",
    "both": "assert f(1) == 1\ndef test_a():\n    assert f(2) == 4",
    "a runner": "def test_a():\n    assert f(2) == 4\nif __name__ == '__main__':\n    import pytest\n    pytest.main()",
    "a try": "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
}


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("put", [lambda text: {"tests": text}, lambda text: {"test": text}], ids=["tests", "test"])
def test_each_shape_tells_right_from_wrong(sandbox, name, put):
    columns = put(SHAPES[name])
    assert complaint(columns) == ""
    right = graded(sandbox, fenced(RIGHT), columns, code_tests)
    assert right.value == 1.0, right.info
    assert graded(sandbox, fenced(WRONG), columns, code_tests).value == 0.0
    assert graded(sandbox, fenced("import os\nos._exit(0)"), columns, code_tests).value == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "def helper():\n    assert f(2) == 4",
        "class Checks:\n    def test_a(self):\n        assert f(2) == 4",
        "import unittest\nclass T(unittest.TestCase):\n    def check_a(self):\n        self.assertEqual(f(2), 4)",
        "import unittest\nif __name__ == '__main__':\n    unittest.main()",
        "import unittest\nclass T(unittest.TestCase):\n    def check_a(self):\n        self.assertEqual(f(2), 4)\n"
        "unittest.main()",
        "from solution import f",
        "x = 4",
        "# assert f(2) == 4",
        "'''assert f(2) == 4'''",
        "class TestF:\n    __test__ = False\n    def test_a(self):\n        assert f(2) == 4",
        "print(f(2))",
        "def check(candidate):\n    assert candidate(2) == 4",
        "lambda: f(2) == 4",
    ],
)
def test_a_text_that_would_run_no_test_is_refused_when_the_set_is_read(text):
    said = complaint({"tests": text})
    assert "\n" not in said
    assert any(one in said for one in ("would run no test", "never calls it", "expected JSON or assertions")), said


def test_what_is_no_python_is_refused_when_the_set_is_read():
    with pytest.raises(DataError, match="are no Python"):
        cases_of_text("assert f(2) ==", "tests")


VAIN = {
    "an empty test": "def test_a():\n    pass",
    "a constant": "def test_a():\n    assert True",
    "arithmetic": "assert 2 * 2 == 4",
    "its own function": "def g(x):\n    return x\ndef test_a():\n    assert g(2) == 2",
    "a module's function": "import math\ndef test_a():\n    assert math.sqrt(4) == 2",
    "an empty method": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        pass\n"
    "unittest.main()",
    "an empty check": "def check(candidate):\n    pass\ncheck(f)",
    "skipped": "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(2) == 4",
    "skipped for a reason": "import pytest\n@pytest.mark.skip(reason='x')\ndef test_a():\n    assert f(2) == 4",
    "a class that is skipped": "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n"
    "    def test_a(self):\n        self.assertEqual(f(2), 4)",
}


@pytest.mark.parametrize("text", VAIN.values(), ids=VAIN)
def test_tests_that_test_nothing_are_refused_when_the_set_is_read(text):
    assert "would test nothing" in complaint({"tests": text})
    assert "would test nothing" in complaint({"test": f"{text}\n", "entry_point": "f"})


def test_a_check_that_checks_nothing_is_refused():
    assert "would test nothing" in complaint({"test": "def check(candidate):\n    pass", "entry_point": "f"})


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nassert importlib.import_module('solution').f(2) == 4",
        "import solution\nassert solution.f(2) == 4",
        "assert sum([1, 2]) == 3",
        "import pytest\n@pytest.mark.skipif(False, reason='x')\ndef test_a():\n    assert f(2) == 4",
        "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(2) == 5\ndef test_b():\n    assert f(2) == 4",
        "import numpy as np\ndef test_a():\n    np.testing.assert_allclose(f(2), 4)",
        "def test_a():\n    f(2)",
    ],
)
def test_tests_that_may_test_something_are_read(text):
    assert complaint({"tests": text}) == ""


@pytest.mark.parametrize("text", ["def test_a():\n    assert len('ab') == 2", "assert max(1, 2) == 2"])
def test_a_test_that_uses_nothing_of_the_program_earns_nothing(sandbox, text):
    assert graded(sandbox, fenced(WRONG), {"tests": text}, code_tests).value == 0.0


def test_each_function_and_method_is_a_test_of_its_own(sandbox):
    text = "def test_a():\n    assert f(2) == 4\nclass TestF:\n    def test_b(self):\n        assert f(2) == 5\n"
    found = graded(sandbox, fenced(RIGHT), {"tests": text})
    assert found.value == 0.5
    assert [one.partition(":")[0] for one in found.info["tests"]] == ["passed", "error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "columns",
    [
        {"tests": {"functional": "def check(c):\n    assert c(2) == 4\ncheck(f)"}},
        {"tests": {"functional": ["assert f(2) == 4"]}},
        {"tests": {"functional": "def check(c):\n    assert c(2) == 4\ncheck(Solution().f)"}},
        {"tests": {"functional": "def check(c):\n    assert c(2) == 4"}, "entry_point": "f"},
        {"tests": '{"functional": "assert f(2) == 4"}'},
        {"tests": {"unittest": "assert f(2) == 4", "inputs": None}},
        {"tests": '["assert f(2) == 4"]'},
        {"reward_model": {"ground_truth": '{"functional": "assert f(2) == 4"}'}},
        {"reward_model": {"ground_truth": "assert f(2) == 4"}, "tests": ""},
        {"tests": "[]", "test_list": ["assert f(2) == 4"]},
        {"tests": "{}", "test_cases": None, "test": "def check(c):\n    assert c(2) == 4", "entry_point": "f"},
    ],
)
def test_where_texts_of_tests_are(sandbox, columns):
    assert complaint(columns) == ""
    assert graded(sandbox, fenced(RIGHT), columns, code_tests).value == 1.0
    assert graded(sandbox, fenced(WRONG), columns, code_tests).value == 0.0


@pytest.mark.parametrize("empty", ["[]", "", "{}", "null", None, [], {}, "  ", {"input": [], "output": []}])
def test_one_column_may_be_empty_in_any_way(empty):
    pairs = [{"input": "1\n", "output": "1\n"}]
    for name in ("private_test_cases", "private_tests", "generated_tests"):
        assert len(program_tests.tests_of({"public_test_cases": pairs, name: empty}).tests) == 1
    assert complaint({"public_test_cases": empty, "private_test_cases": empty}).startswith("no tests: expected")
    assert complaint({"tests": empty}).startswith("no tests: expected")


def test_a_name_of_python_means_the_programs_where_it_is_what_is_tested(sandbox):
    source = "def sum(a, b): return a + b\ndef gcd(a, b): return 7\ndef Counter(x): return 5"
    for text in (
        "assert sum(1, 2) == 3",
        "from solution import Counter\nassert Counter(1) == 5",
        "assert gcd(4, 6) == 7",
    ):
        assert graded(sandbox, fenced(source), {"tests": text}, code_tests).value == 1.0, text
    assert graded(sandbox, fenced("x = 1"), {"tests": "assert gcd(4, 6) == 2"}).value == 0.0
    assert (
        graded(sandbox, fenced("def f(x): return []\ndef sum(a): return 4"), {"tests": "assert sum(f(2)) == 4"}).value
        == 0
    )


@pytest.mark.parametrize(
    "modules",
    [{"helper.py": "def double(x): return 2 * x"}, [{"name": "helper", "text": "def double(x): return 2 * x"}]],
)
def test_a_row_brings_modules_along(sandbox, modules):
    columns = {"tests": "from helper import double\nfrom bank import f\nassert f(2) == double(2)", "modules": modules}
    assert complaint(columns) == ""
    assert graded(sandbox, fenced(RIGHT), columns, code_tests).value == 1.0
    assert graded(sandbox, fenced(WRONG), columns, code_tests).value == 0.0
    own = "from helper import double\ndef f(x): return double(x)"
    assert graded(sandbox, fenced(own), columns, code_tests).value == 1.0


@pytest.mark.parametrize("modules", ["{", 5, {"a b": "x = 1"}, {"helper": "def"}, {"helper": 4}, ["x"]])
def test_modules_of_another_shape_are_refused(modules):
    assert "modules" in complaint({"tests": "assert f(2) == 4", "modules": modules})


COLLECTED = {
    "a word in a decorator": "import pytest\n@pytest.mark.parametrize('fixture_value', [2])\n"
    "def test_a(fixture_value):\n    assert f(fixture_value) == 4",
    "a fixture that is used": "import pytest\n@pytest.fixture\ndef five(): return 5\n"
    "@pytest.mark.usefixtures('five')\ndef test_a():\n    assert f(2) == 4",
    "a class in a class": "class TestA:\n    class TestB:\n        def test_a(self):\n            assert f(2) == 4",
    "under an if": "if True:\n    def test_a():\n        assert f(2) == 4",
    "under a try": "try:\n    import nothing_at_all\nexcept ImportError:\n    def test_a():\n        assert f(2) == 4",
    "in a loop": "for n in (2, 3):\n    def test_a(n=n):\n        assert f(n) == n * n",
    "assigned": "def make(n):\n    return lambda: check(n)\ndef check(n):\n    assert f(n) == n * n\ntest_a = make(2)",
    "set": "import unittest\nclass T(unittest.TestCase):\n    def test_b(self):\n        pass\n"
    "for n in (2, 3):\n    setattr(T, f'test_{n}', lambda self, n=n: self.assertEqual(f(n), n * n))",
    "of a mixin": "import unittest\nclass Mixin:\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n"
    "class T(Mixin, unittest.TestCase):\n    pass",
    "loaded": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n"
    "def load_tests(loader, tests, pattern):\n    return tests",
    "a static method": "class TestA:\n    @staticmethod\n    def test_a():\n        assert f(2) == 4",
    "a decorated one": "import functools\ndef twice(test):\n    @functools.wraps(test)\n    def run():\n"
    "        test()\n        test()\n    return run\n@twice\ndef test_a():\n    assert f(2) == 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTED)
@pytest.mark.parametrize("beside", ["", "\ndef test_beside():\n    f(1)\n"], ids=["alone", "beside another"])
def test_pytest_says_which_tests_there_are(sandbox, name, beside):
    columns = {"tests": COLLECTED[name] + beside}
    assert complaint(columns) == ""
    assert graded(sandbox, fenced(RIGHT), columns, code_tests).value == 1.0
    assert graded(sandbox, fenced(WRONG), columns, code_tests).value == 0.0


@pytest.mark.parametrize("module", ["accumulate", "src.accumulate", "my_package.parts.accumulate", ".accumulate"])
def test_the_program_is_what_tests_import_by_its_own_name(sandbox, module):
    columns = {"tests": f"from {module} import f\ndef test_a():\n    assert f(2) == 4"}
    assert complaint(columns) == ""
    assert graded(sandbox, fenced(RIGHT), columns, code_tests).value == 1.0
    assert graded(sandbox, fenced(WRONG), columns, code_tests).value == 0.0


def test_a_text_in_which_pytest_finds_no_test_earns_nothing(sandbox):
    found = graded(sandbox, fenced(RIGHT), {"tests": "if f(2) == 5:\n    def test_a():\n        assert f(2) == 4"})
    assert found.value == 0.0
    assert "pytest finds no test in it" in found.info["tests"][0]


def test_what_a_program_ends_is_begun_anew_behind_its_test(sandbox):
    text = "from solution import f\n" + "".join(f"def test_{n}():\n    assert f({n}) == {n * n}\n" for n in range(6))
    source = "import os\ndef f(x):\n    if x in (2, 3): os._exit(0)\n    return x * x"
    found = graded(sandbox, fenced(source), {"tests": text})
    assert found.value == pytest.approx(4 / 6)
    assert [one.partition(":")[0] for one in found.info["tests"]] == ["passed"] * 2 + ["error"] * 2 + ["passed"] * 2


def test_why_a_program_had_a_process_of_its_own_is_said_where_it_fails(sandbox):
    found = graded(sandbox, fenced("import gc\ndef f(x): return 0"), {"tests": "assert f(2) == 4"})
    assert found.info["separate_process"] == "it imports gc (line 1)"
    right = graded(sandbox, fenced("import gc\ndef f(x): return 4"), {"tests": "assert f(2) == 4"})
    assert "separate_process" not in right.info


@pytest.mark.parametrize("handler", ["raise ImportError('no') from None", "f = None"])
def test_the_program_may_be_imported_within_a_try(sandbox, handler):
    text = f"try:\n    from lasagna import f\nexcept ImportError:\n    {handler}\ndef test_a():\n    assert f(2) == 4"
    assert complaint({"tests": text}) == ""
    assert graded(sandbox, fenced(RIGHT), {"tests": text}, code_tests).value == 1.0
    assert graded(sandbox, fenced(WRONG), {"tests": text}, code_tests).value == 0.0
