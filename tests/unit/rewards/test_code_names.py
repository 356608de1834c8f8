"""What a program may use without an import, what it may import, and what the report says of what is missing."""

import json

import pytest

from gtpo_megatron.errors import ConfigError, SandboxError
from gtpo_megatron.rewards.code_tests import code_tests, complaint
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox, check_sandbox
from gtpo_megatron.sandbox.inside import prelude
from gtpo_megatron.sandbox.packages import DEFAULT
from tests.sandboxes import needs_bubblewrap
from tests.unit.rewards.test_code_tests import fenced, graded

KINDS = ["unsafe", pytest.param("bubblewrap", marks=[needs_bubblewrap, pytest.mark.slow])]


def opened(kind, packages=""):
    return UnsafeSandbox(packages) if kind == "unsafe" else BubblewrapSandbox(packages)


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request):
    made = opened(request.param)
    yield made
    made.close()


def of_lcb(name, starter, arguments, wanted):
    case = {"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(wanted), "testtype": "functional"}
    return {
        "public_test_cases": json.dumps([case]),
        "private_test_cases": "[]",
        "metadata": json.dumps({"func_name": name}),
        "starter_code": starter,
    }


BODIES = [
    "return Counter(n).most_common(1)[0][0]",
    "return heappop(heapq.nsmallest(1, n)) or heapq.heappop(n)",
    "return bisect_left(n, 2) + bisect.bisect(n, 0)",
    "d = defaultdict(list); d[0].append(1); return reduce(operator.add, n, 0) - 5",
    "@lru_cache(None)\n        def g(i): return i if i < 1 else g(i - 1)\n        return g(3) + 1",
    "@cache\n        def g(i): return i\n        return g(1)",
    "x: Optional[Dict[str, Tuple[int, ...]]] = None; return min(accumulate(n))",
    "q = deque(n); return q.popleft()",
    "return gcd(3, 4) if inf == math.inf and nan != nan else 0",
    "return len(list(permutations(n))) // 6 + len(list(product([], n)))",
    "head = ListNode(1, ListNode(2)); return head.val",
    "return TreeNode(1, None, TreeNode(2)).val",
    "return SortedList(n)[0] if SortedDict() == {} and not SortedSet() else 0",
    "return int(Decimal(1)) if False else int(re.match('1', '1').group()) + len(string.ascii_lowercase) - 26",
]


@pytest.mark.parametrize("body", BODIES)
def test_a_starters_names_are_there(sandbox, body):
    starter = "class Solution:\n    def one(self, n: List[int]) -> Optional[int]:\n        "
    columns = of_lcb("one", starter, [[1, 2, 3]], 1)
    body = body.replace("int(Decimal(1)) if False else ", "")
    found = graded(sandbox, fenced(starter + body), columns, code_tests)
    assert found.value == 1.0, found.info


OWN = {
    "a function": ("def gcd(a, b): return 'mine'\ndef f(): return gcd(4, 6)", "mine"),
    "a class": ("class ListNode:\n    kind = 'mine'\ndef f(): return ListNode.kind", "mine"),
    "a variable": ("inf = 'mine'\ndef f(): return inf", "mine"),
    "an import": ("from operator import add as deque\ndef f(): return deque('mi', 'ne')", "mine"),
    "a module's name": ("math = 'mine'\ndef f(): return math", "mine"),
    "python's own": ("def f(): return [pow(2, 3), sum([1], 2)]", [8, 3]),
    "open stays open": ("def f(): return open.__module__ in ('io', '_io')", True),
    "looked up": ("def f(): return 'Counter' in globals()", False),
    "the first error": ("def f():\n    try: undefined_name\n    except NameError: return 'mine'", "mine"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_what_a_program_defines_is_never_hidden(sandbox, name):
    source, wanted = OWN[name]
    columns = {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [wanted]}}
    found = graded(sandbox, fenced(source), columns, code_tests)
    assert found.value == 1.0, found.info
    assert graded(sandbox, fenced(source), {"tests": f"assert f() == {wanted!r}"}, code_tests).value == 1.0


def test_programs_of_standard_input_have_the_names_too(sandbox):
    columns = {"tests": [{"input": "3 1\n", "output": "1 3"}]}
    source = "x = sorted(map(int, stdin.readline().split()))\nprint(*list(chain(x)))"
    assert graded(sandbox, fenced(source), columns, code_tests).value == 1.0


def test_a_row_says_other_names_or_none(sandbox):
    columns = {"tests": {"fn_name": "f", "inputs": [[]], "outputs": [3]}}
    source = fenced("def f(): return three")
    assert graded(sandbox, source, columns | {"prelude": "three = 3"}, code_tests).value == 1.0
    found = graded(sandbox, fenced("def f(): return len(Counter('abc'))"), columns | {"prelude": ""}, code_tests)
    assert found.value == 0.0
    assert "NameError" in found.info["tests"][0]
    assert "prelude is no Python" in complaint(columns | {"prelude": "three ="})


def test_a_future_import_stays_first_and_lines_keep_their_numbers(sandbox):
    stub = "from typing import List\nimport math\n\ndef f(x: List[int]) -> int:\n"
    columns = {"test": "def check(c):\n    assert c([2]) == 4", "entry_point": "f", "stub": stub}
    source = "'''Squares.'''\nfrom __future__ import annotations\ndef f(x: List[Later]): return math.prod(x) ** 2"
    assert graded(sandbox, fenced(source), columns, code_tests).value == 1.0
    found = graded(sandbox, fenced("from __future__ import annotations\n\ndef f(x): return 1 / 0"), columns)
    assert "(line 3)" in found.info["tests"][0]


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\ndef f(x): return np.square(x)",
        "import numpy\ndef f(x): return int(numpy.linalg.det(numpy.eye(2) * x))",
        "from sortedcontainers import SortedList\ndef f(x): return SortedList([x * x])[0]",
    ],
)
def test_packages_that_are_there(sandbox, source):
    for columns in ({"tests": ["assert f(2) == 4"]}, {"tests": {"fn_name": "f", "inputs": [[2]], "outputs": [4]}}):
        found = graded(sandbox, fenced(source), columns, code_tests)
        assert found.value == 1.0, found.info


def test_arrays_are_compared_by_tests(sandbox):
    source = fenced("import numpy as np\ndef f(x): return np.asarray(x) * 2\ndef g(x): return x.sum()")
    tests = [
        "import numpy as np\nassert (f([1, 2]) == np.array([2, 4])).all()",
        "import numpy as np\nnp.testing.assert_allclose(f(np.ones((2, 2))), 2 * np.ones((2, 2)))",
        "import numpy as np\nassert g(np.array([1, 2])) == 3 and f(1.5).dtype == np.float64",
        "import numpy as np\nassert isinstance(f(2), np.integer)",
    ]
    found = graded(sandbox, source, {"tests": tests}, code_tests)
    assert found.value == 1.0, found.info
    wrong = source.replace("* 2", "* 3.5").replace("x.sum()", "0")
    assert graded(sandbox, wrong, {"tests": tests}).value == 0.0


def test_a_package_that_is_missing_is_said(sandbox):
    for columns in ({"tests": ["assert f(2) == 4"]}, {"tests": [{"input": "", "output": ""}]}):
        found = graded(sandbox, fenced("import torch.nn\ndef f(x): return 4"), columns)
        assert found.value == 0.0
        assert found.info["packages"] == "torch is not in the sandbox; reward.packages says what is"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_packages_of_ones_own(kind, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "__init__.py").write_text("FOUR = 4")
    for one in (tmp_path, *tmp_path.parents):
        if one.stat().st_uid and one.stat().st_mode & 0o005 != 0o005:
            pytest.skip("the folder is not open to all")
        if one.stat().st_mode & 0o005 != 0o005 and one.is_relative_to("/tmp") and one.name != "tmp":
            one.chmod(0o755)
    made = opened(kind, str(tmp_path))
    try:
        columns = {"tests": ["assert f() == 4"]}
        assert graded(made, fenced("import mine\ndef f(): return mine.FOUR"), columns, code_tests).value == 1.0
        source = "import numpy\ndef f(): return 4"
        assert "numpy is not in the sandbox" in graded(made, fenced(source), columns).info["packages"]
        if kind == "bubblewrap":
            source = "import mine\ndef f():\n    open(mine.__file__, 'w')\n    return 4"
            assert "Read-only" in graded(made, fenced(source), columns).info["tests"][0]
    finally:
        made.close()


def test_a_folder_of_packages_that_is_not_there_is_a_line_before_a_run(tmp_path):
    with pytest.raises(ConfigError, match="no such folder; make it by pip install --target"):
        check_sandbox("unsafe", str(tmp_path / "none"))
    with pytest.raises(SandboxError, match="no such folder"):
        UnsafeSandbox(str(tmp_path / "none")).prepare()


def test_no_name_of_the_prelude_is_one_of_pythons_own():
    import builtins

    found = prelude.names()
    assert not set(found) & set(vars(builtins))
    assert {"List", "deque", "heappush", "ListNode", "TreeNode", "inf", "math"} <= set(found)
    assert DEFAULT == ("numpy", "sortedcontainers")
