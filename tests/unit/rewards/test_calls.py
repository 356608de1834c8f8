"""Calls and programs that a benchmark's own grader takes: deep recursion, long integers, LeetCode's nodes."""

import sys

import pytest

from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from tests.sandboxes import needs_bubblewrap
from tests.unit.rewards.test_code_tests import fenced, graded

DEPTH = 49_000

DEEP = {  # what recurses, as a function f(n) that returns n; how deep it must go
    "a function": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", DEPTH),
    "a method": ("class A:\n    def f(self, n): return 0 if n == 0 else 1 + self.f(n - 1)\nf = A().f", DEPTH),
    "an inner function": (
        "def f(n):\n    def g(m):\n        return m if m == n else g(m + 1)\n    return g(0)",
        DEPTH,
    ),
    # Python 3.11 counts two for each call through a cache
    "a cache": ("@lru_cache(None)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", DEPTH // 2),
    "a generator": (
        "def g(n, m=0):\n    if m < n: yield from g(n, m + 1)\n    else: yield m\ndef f(n): return list(g(n))[0]",
        20_000,
    ),
    "a sort's key": (
        "def g(n): return 0 if n == 0 else sorted([n - 1], key=g) and 0\ndef f(n): return n + g(n)",
        20_000,
    ),
    "an operator": (
        "class A:\n    def __init__(self, n): self.n = n\n"
        "    def __add__(self, one): return 0 if self.n == 0 else one + (A(self.n - 1) + one)\n"
        "def f(n): return A(n) + 1",
        DEPTH // 2,
    ),
    "a nested list": (
        "def f(n):\n    x = []\n    for _ in range(n): x = [x]\n    return repr(x).count('[') - 1",
        20_000,
    ),
}


@pytest.fixture(
    scope="module", params=["unsafe", pytest.param("bubblewrap", marks=[needs_bubblewrap, pytest.mark.slow])]
)
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


def of_calls(*pairs, **columns):
    return {
        "tests": {"fn_name": "f", "inputs": [one for one, _ in pairs], "outputs": [one for _, one in pairs]},
        **columns,
    }


def verdicts(sandbox, program, columns):
    return graded(sandbox, fenced(program), columns, limit_s=60.0).info["tests"]


THROUGH_C = ("a cache", "a sort's key", "an operator", "a nested list")
"""What Python from 3.12 on ends sooner, by a limit that cannot be set."""


@pytest.mark.slow
@pytest.mark.parametrize("what", [one for one in DEEP if sys.version_info < (3, 12) or one not in THROUGH_C])
def test_recursion_is_as_deep_as_livecodebench_has_it(sandbox, what):
    program, depth = DEEP[what]
    assert verdicts(sandbox, program, of_calls(([depth], depth))) == ["passed"]
    from_input = {"tests": [{"input": f"{depth}\n", "output": f"{depth}\n"}]}
    assert verdicts(sandbox, f"{program}\nprint(f(int(input())))", from_input) == ["passed"]


def test_recursion_without_end_is_an_error_that_a_program_can_catch(sandbox):
    program = "def g(n): return g(n + 1)\ndef f(n):\n    try: return g(n)\n    except RecursionError: return 'too deep'"
    assert verdicts(sandbox, program, of_calls(([1], "too deep"))) == ["passed"]


def test_integers_of_any_length(sandbox):
    nines = "9" * 6000
    program = f"n = int(input())\nprint(n, len(str(2 ** 20000)), {nines} == n)"
    columns = {"tests": [{"input": f"{nines}\n", "output": f"{nines} 6021 True\n"}]}
    assert verdicts(sandbox, program, columns) == ["passed"]
    assert verdicts(sandbox, "def f(n): return len(str(2 ** n))", of_calls(([20000], 6021))) == ["passed"]
    found = verdicts(sandbox, "def f(n): return 2 ** n", of_calls(([20000], 1), ([3], 8)))
    assert found == ["wrong value", "passed"]


LINKED = "class Solution:\n    def f(self, head: Optional[ListNode], n: int) -> Optional[ListNode]:\n        "
TREE = "class Solution:\n    def f(self, root: Optional[TreeNode]) -> Optional[TreeNode]:\n        "
MANY = "class Solution:\n    def f(self, lists: List[Optional[ListNode]]) -> Optional[ListNode]:\n        "
DROP = "class Solution:\n  def f(self, head, n):\n    while n and head: head, n = head.next, n - 1\n    return head"
INVERT = """class Solution:
    def f(self, root):
        if root:
            root.left, root.right = self.f(root.right), self.f(root.left)
        return root"""
MERGE = """class Solution:
    def f(self, lists):
        values = []
        for one in lists:
            while one:
                values.append(one.val)
                one = one.next
        head = None
        for value in sorted(values, reverse=True):
            head = ListNode(value, head)
        return head"""
OWN = "class ListNode:\n    def __init__(self, x):\n        self.val = x\n        self.next = None\n"


def test_linked_lists_are_given_and_returned_as_lists(sandbox):
    columns = of_calls(([[1, 2, 3], 1], [2, 3]), ([[1], 1], []), ([[], 0], []), starter_code=LINKED)
    assert verdicts(sandbox, DROP, columns) == ["passed"] * 3
    assert verdicts(sandbox, OWN + DROP, columns) == ["passed"] * 3
    assert verdicts(sandbox, DROP.replace("n - 1", "n - 2"), columns)[2] == "passed"
    assert verdicts(sandbox, "class Solution:\n  def f(self, head, n): return head", columns)[0] == "wrong value"


def test_without_a_starter_the_programs_own_annotations_say_so(sandbox):
    columns = of_calls(([[1, 2, 3], 1], [2, 3]), ([[1], 1], []))
    annotated = DROP.replace("head, n)", "head: Optional[ListNode], n: int) -> Optional[ListNode]", 1)
    assert verdicts(sandbox, annotated, columns) == ["passed"] * 2
    later = "from __future__ import annotations\n" + annotated
    assert verdicts(sandbox, later, columns) == ["passed"] * 2
    assert verdicts(sandbox, "def f(head, n): return head[n:]", columns) == ["passed"] * 2  # they are lists


def test_trees_and_lists_of_nodes(sandbox):
    pairs = [([[4, 2, 7, 1, None, 6, 9]], [4, 7, 2, 9, 6, None, 1]), ([[]], []), ([[1, None, 2]], [1, 2])]
    assert verdicts(sandbox, INVERT, of_calls(*pairs, starter_code=TREE)) == ["passed"] * 3
    pairs = [([[[1, 4], [], [2]]], [1, 2, 4]), ([[]], [])]
    assert verdicts(sandbox, MERGE, of_calls(*pairs, starter_code=MANY)) == ["passed"] * 2


def test_a_list_that_leads_back_into_itself_is_an_error(sandbox):
    program = "class Solution:\n  def f(self, head, n):\n    head.next = head\n    return head"
    [found] = verdicts(sandbox, program, of_calls(([[1], 1], [1]), starter_code=LINKED))
    assert found == "error: ValueError: the returned list leads back into itself"


def test_an_endless_generator_costs_its_limit(sandbox):
    [found] = verdicts(sandbox, "def f(n): return itertools.count()", of_calls(([1], [1]), time_limit=1))
    assert found.split(":")[0] in ("timeout", "error")
