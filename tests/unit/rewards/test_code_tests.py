"""Programs in responses are found, run on real tests in a real sandbox, and compared outside it."""

import json
import shutil

import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.code_tests import code_tests, share_of_tests
from gtpo_megatron.rewards.function import complaint, resolve_rewards
from gtpo_megatron.rewards.outputs import same_output
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tests.sandboxes import needs_bubblewrap

ADD = {"tests": {"fn_name": "add", "inputs": [[1, 2], [3, 4], [0, 0]], "outputs": [3, 7, 0]}}
DOUBLE = {"tests": [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10"}]}


@pytest.fixture(scope="module", params=["unsafe", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


def fenced(source, language="python"):
    return f"Let me think.\n```{language}\n{source}\n```\nDone."


def graded(sandbox, response, columns, function=share_of_tests, limit_s=20.0):
    request = RewardRequest(response=response, columns_json=json.dumps(columns), limit_s=limit_s, sandbox=sandbox)
    return function(request)


@pytest.mark.parametrize(
    ("expected", "given", "is_same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333334", True),
        ("0.5", "0.6", False),
        ("10", "10.0", False),
        ("1e3", "1000.0", True),
        ("yes", "Yes", False),
        ("", "\n\n", True),
        ("1.0 nan", "1.0 nan", True),
        ("1.5", "1.5x", False),
        ("a\0b", "a\0b", True),
        ("a b", "  a   b", True),
    ],
)
def test_outputs_are_equal_but_for_blanks_and_the_last_digits(expected, given, is_same):
    assert same_output(expected, given) is is_same


def test_calls_are_compared_by_value(sandbox):
    reward = graded(sandbox, fenced("def add(a, b):\n    return a + b if a else 1"), ADD)
    assert reward.value == pytest.approx(2 / 3)
    assert reward.info == {"tests": ["passed", "passed", "wrong value"]}
    assert graded(sandbox, fenced("def add(a, b):\n    return a + b"), ADD, code_tests).value == 1.0
    assert graded(sandbox, fenced("def add(a, b):\n    return a + b if a else 1"), ADD, code_tests).value == 0.0
    assert graded(sandbox, fenced("class Solution:\n    def add(self, a, b):\n        return a + b"), ADD).value == 1.0


def test_values_of_many_types(sandbox):
    values = [[1, 2], [0.1 + 0.2], {"a": [1]}, None, True, "x", [1, 2, 3]]
    columns = {"tests": {"fn_name": "f", "inputs": [[i] for i in range(7)], "outputs": [
        [1, 2], [0.3], {"a": [1]}, None, True, "x", [1, 2, 3]
    ]}}  # fmt: skip
    source = f"values = {values!r}\nvalues[0] = (1, 2)\nvalues[6] = {{3, 1, 2}}\ndef f(i): return values[i]"
    assert graded(sandbox, fenced(source), columns).info["tests"] == ["passed"] * 7
    columns["tests"]["outputs"][0] = [[1, 2]]  # as TACO writes some lists
    assert graded(sandbox, fenced(source), columns).info["tests"] == ["passed"] * 7
    columns["tests"]["outputs"][4] = 1  # a truth value is no number
    assert graded(sandbox, fenced(source), columns).info["tests"][4] == "wrong value"


def test_an_integer_beyond_all_floats_is_a_wrong_value(sandbox):
    columns = {"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2.5, 2.5]}}
    reward = graded(sandbox, fenced("def f(i): return 10 ** 400 if i == 1 else 2.5"), columns)
    assert reward.info["tests"] == ["wrong value", "passed"]


def test_standard_input_is_a_fresh_program_each_time(sandbox):
    source = "import sys, builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint(int(input()) * 2 * builtins.n)"
    assert graded(sandbox, fenced(source), DOUBLE).value == 1.0
    assert graded(sandbox, fenced("import sys\nprint(4)\nsys.exit(0)"), DOUBLE).info["tests"] == [
        "passed",
        "wrong output",
    ]
    assert graded(sandbox, fenced("print(4)\nraise SystemExit('no')"), DOUBLE).value == 0.0


def test_assertions_count_one_by_one(sandbox):
    columns = {"test_list": ["assert f(1) == 1", "assert f(2) == 1", "assert isinstance(f(0), int)"]}
    found = graded(sandbox, fenced("def f(x): return x"), columns)
    assert found.value == pytest.approx(2 / 3)
    assert found.info["tests"][1].startswith("error: AssertionError")


def test_leaving_early_is_not_passing(sandbox):
    columns = {"test_list": ["assert f(1) == 2"] * 3}
    for source in ("import os\nos._exit(0)", "raise SystemExit", "def f(x):\n    import os\n    os._exit(0)"):
        assert graded(sandbox, fenced(source), columns).value == 0.0


def test_a_stub_completes_a_program(sandbox):
    columns = {
        "test": "def check(f):\n    assert f([1.0]) == 1.0\n",
        "entry_point": "first",
        "stub": "from typing import List\n\ndef first(xs: List[float]) -> float:\n    '''First.'''\n",
    }
    assert graded(sandbox, fenced("    return xs[0]"), columns).value == 1.0
    assert graded(sandbox, fenced("def first(xs: List[float]):\n    return xs[0]"), columns).value == 1.0


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("", {"program": "the response has none"}),
        ("```python\n```", {"program": "the response has none"}),
        (fenced("def ("), None),
    ],
)
def test_no_program_and_no_syntax_are_zero_and_counted(sandbox, response, said):
    reward = graded(sandbox, response, ADD)
    assert (reward.value, reward.parts["runs"]) == (0.0, 0.0)
    assert reward.parts["has_code"] == float(said is None)
    assert reward.info == said if said else "SyntaxError" in reward.info["compiler"]


def test_bytes_that_are_no_text_are_a_wrong_output(sandbox):
    source = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x00' * 10)"
    assert graded(sandbox, fenced(source), DOUBLE).info["tests"] == ["wrong output"] * 2
    surrogate = "def add(a, b): return '\\ud800'"
    assert graded(sandbox, fenced(surrogate), ADD).value == 0.0


def test_a_test_that_hangs_costs_its_limit_once_and_the_others_are_not_run(sandbox):
    reward = graded(sandbox, fenced("def add(a, b):\n    while a: pass\n    return 0"), ADD | {"time_limit": 1.0})
    assert reward.value == 0.0
    assert [one.split(":")[0] for one in reward.info["tests"]] == ["timeout", "not run", "not run"]


def test_a_call_that_dies_leaves_the_others(sandbox):
    source = "import os, sys\ndef add(a, b):\n    if a == 3: os.abort()\n    return a + b"
    found = graded(sandbox, fenced(source), ADD).info["tests"]
    assert [found[0], found[1].split(":")[0], found[2]] == ["passed", "error", "passed"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_cpp_is_compiled_once_and_run_per_test(sandbox):
    source = "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x << std::endl; }"
    columns = DOUBLE | {"language": "cpp"}
    assert graded(sandbox, fenced(source, "cpp"), columns, limit_s=120.0).value == 1.0
    found = graded(sandbox, fenced("int main( {", "cpp"), columns, limit_s=120.0)
    assert "error" in found.info["compiler"]


def test_a_row_without_usable_tests_is_refused_before_the_run():
    functions = resolve_rewards("gtpo_megatron.rewards.code_tests:code_tests")
    assert functions[0].statement.needs_sandbox
    assert complaint(functions, json.dumps(ADD)) == ""
    assert complaint(functions, '{"id": 1}').startswith("no tests: ")


@needs_bubblewrap
def test_in_the_pool_a_row_without_tests_is_a_failure_and_the_next_is_right(caplog):
    config = RewardConfig(function="gtpo_megatron.rewards.code_tests:share_of_tests", num_workers=1, timeout_s=30.0)
    good = fenced("def add(a, b):\n    return a + b")
    rows = [RewardRequest(response=good, columns_json=text) for text in (json.dumps(ADD), "{}", json.dumps(ADD))]
    with RewardPool(config) as pool:
        batch = reward_batch(pool.grade(rows))
    assert batch.rewards.tolist() == [1.0, 0.0, 1.0]
    assert batch.failed.tolist() == [False, True, False]
    assert "DataError: no tests" in caplog.text
    assert batch.parts["tests_passed"][0] == 1.0
    assert json.loads(batch.info[2]) == {"tests": ["passed"] * 3}
