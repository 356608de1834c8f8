"""Tests of programs in every shape that data sets have."""

import base64
import json
import pickle
import zlib

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.program_tests import tests_of as read
from gtpo_megatron.sandbox.protocol import Case

STDIN = [("1\n", "2\n"), ("3\n", "4\n")]


def pairs(columns):
    return [(test.case.stdin, test.output) for test in read(columns).tests]


@pytest.mark.parametrize(
    "columns",
    [
        {"tests": [{"input": given, "output": wanted} for given, wanted in STDIN]},
        {"tests": json.dumps([{"input": given, "output": wanted, "testtype": "stdin"} for given, wanted in STDIN])},
        {"input_output": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]})},
        {"reward_model": {"ground_truth": json.dumps({"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]})}},
        {
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": ["3\n"], "output": ["4\n"]},
            "generated_tests": {"input": [], "output": []},
        },
        {"unit_tests": {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]}},
        {
            "official_tests": [{"input": given, "output": wanted} for given, wanted in STDIN],
            "generated_checker": None,
            "input_mode": "stdio",
        },
        {
            "verification_info": json.dumps(
                {
                    "language": "python",
                    "test_cases": [
                        {"fn_name": None, "type": "stdin_stdout", "input": given, "output": wanted}
                        for given, wanted in STDIN
                    ],
                }
            )
        },
    ],
)
def test_pairs_of_input_and_output(columns):
    assert pairs(columns) == STDIN


def test_lines_are_joined():
    assert pairs({"tests": {"inputs": [["1", 2]], "outputs": [["3"]]}}) == [("1\n2", "3")]


def test_calls_in_lists():
    columns = {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}}
    [test] = read(columns).tests
    assert test.case == Case(function="add", arguments="[1, 2]")
    assert test.value == "[3]"
    assert read(columns).entry_point == "add"


def test_a_test_may_name_its_function():
    test = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional", "metadata": {"func_name": "addAll"}}
    [found] = read({"tests": [test]}).tests
    assert (found.case, found.value) == (Case(function="addAll", arguments="[[1, 2], 3]"), "6")


def test_live_code_bench_packs_its_private_tests():
    private = [{"input": "[1, 2]\n3", "output": "true", "testtype": "functional"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode()
    columns = {
        "public_test_cases": json.dumps([{"input": "[]\n0", "output": "false", "testtype": "functional"}]),
        "private_test_cases": packed,
        "metadata": '{"func_name": "has"}',
        "starter_code": "class Solution:\n    def has(self, xs, x):",
    }
    found = read(columns)
    assert [(test.case.function, test.case.arguments, test.value) for test in found.tests] == [
        ("has", "[[], 0]", "false"),
        ("has", "[[1, 2], 3]", "true"),
    ]


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def test_a_pickle_is_read_and_not_run():
    packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(DataError, match="private_test_cases"):
        read({"private_test_cases": packed})


def test_assertions_of_mbpp_and_humaneval():
    mbpp = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_imports": ["import math"]}
    assert [test.case.code for test in read(mbpp).tests] == [
        "import math\nassert f(1) == 2",
        "import math\nassert f(2) == 3",
    ]
    humaneval = {"test": "def check(g):\n    assert g(1) == 2", "entry_point": "f", "stub": "def f(x):\n"}
    found = read(humaneval)
    assert found.tests[0].case.code.endswith("\ncheck(f)")
    assert (found.entry_point, found.stub) == ("f", "def f(x):\n")
    assert read({"tests": "assert f(1) == 2"}).tests[0].case.code == "assert f(1) == 2"


def test_limit_and_language_are_the_rows():
    columns = {"tests": [{"input": "", "output": "1"}], "time_limit": 2, "language": "C++"}
    assert (read(columns).case_s, read(columns).language) == (2.0, "cpp")


def test_verification_info_may_have_calls_and_a_language():
    case = {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}
    [test] = read({"verification_info": {"language": "python", "test_cases": [case]}}).tests
    assert (test.case.function, test.case.arguments, test.value) == ("add", "[1, 2]", "3")
    printed = {"type": "stdin_stdout", "input": "1", "output": "2"}
    assert read({"verification_info": {"language": "cpp", "test_cases": [printed]}}).language == "cpp"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (2, 2.0),
        (0.5, 0.5),
        ("6", 6.0),
        ("2.0 seconds", 2.0),
        ("1 s", 1.0),
        ("1500 ms", 1.5),
        ("2 seconds per test", 2.0),
        ({"seconds": 6}, 6.0),
        ({"seconds": 2, "nanos": 500_000_000}, 2.5),
        ({"seconds": None, "nanos": 500_000_000}, 0.5),
        ({"seconds": 0, "nanos": 0}, 0.0),
        (None, 0.0),
        ("", 0.0),
        (0, 0.0),
    ],
)
def test_a_time_limit_in_every_form(limit, seconds):
    assert read({"tests": [{"input": "", "output": "1"}], "time_limit": limit}).case_s == seconds


LEETCODE = (
    "class Solution:\n    def f(self, head: Optional[ListNode], n: List[int]) -> List[Optional[TreeNode]]:\n        "
)


def test_a_starters_annotations_say_which_arguments_are_nodes():
    tests = {"fn_name": "f", "inputs": [[[1], [2]]], "outputs": [[]]}
    assert read({"tests": tests, "starter_code": LEETCODE}).tests[0].case.kinds == ("ListNode", "", "[TreeNode]")
    assert read({"tests": tests, "stub": "def g(x: ListNode):"}).tests[0].case.kinds == ()
    assert read({"tests": tests, "stub": "def f(x, y):"}).tests[0].case.kinds == ("", "", "")


def test_a_rows_comparison_is_its_tests():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
    [test] = read({"tests": tests, "comparison": "livecodebench"}).tests
    assert (test.comparison, test.case.is_exact) == ("livecodebench", True)
    [test] = read({"tests": tests}).tests
    assert (test.comparison, test.case.is_exact) == ("", False)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"id": 1, "text": "x"}, "no tests: .*the row has id, text"),
        ({"tests": []}, "no tests"),
        ({"tests": "{not json"}, "tests: not valid JSON"),
        ({"tests": "hello"}, "expected JSON or assertions"),
        ({"tests": [{"input": "1"}]}, r"tests\[0\] has no output"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, r"tests\[0\] calls a function, and"),
        ({"tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, "2 inputs and 1 outputs"),
        ({"tests": {"input": "1"}}, "expected lists of inputs and outputs"),
        ({"tests": 5}, "tests is 5"),
        ({"tests": [{"input": {"a": 1}, "output": "1"}]}, "expected text"),
        ({"tests": [{"input": "", "output": "1"}], "language": "cobol"}, "language is 'cobol'"),
        ({"tests": ["assert f()"], "language": "cpp"}, r"tests of C\+\+ programs must have input and output"),
        ({"test_list": [1]}, "test_list is"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": "soon"}, "time_limit is 'soon'; expected seconds"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": "2 minutes"}, "time_limit is '2 minutes'"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": "2.5e3"}, "time_limit is '2.5e3'"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": -1}, "time_limit is -1"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": True}, "time_limit is True"),
        ({"tests": [{"input": "", "output": "1"}], "time_limit": {"seconds": "2"}}, "time_limit is {"),
        (
            {"tests": [{"input": "", "output": "1"}], "comparison": "mine"},
            "comparison is 'mine'; expected livecodebench",
        ),
        ({"verification_info": {"ground_truth": "5"}}, "verification_info has the keys"),
        (
            {"official_tests": [{"input": "", "output": "1"}], "generated_checker": "x"},
            "generated_checker says that more",
        ),
        ({"official_tests": [{"input": "", "output": "1"}], "interaction_format": "x"}, "interaction_format says"),
        ({"official_tests": [{"input": "", "output": "1"}], "input_mode": "file"}, "input_mode is 'file'"),
    ],
)
def test_what_is_wrong_is_one_line(columns, complaint):
    with pytest.raises(DataError, match=complaint):
        read(columns)
