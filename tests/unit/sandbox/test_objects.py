"""Tests in Python of programs in a separate process: none earns a test by what it is, says, patches or ends."""

import pytest

from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox
from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits
from tests.sandboxes import needs_bubblewrap


@pytest.fixture(
    scope="module", params=["unsafe", pytest.param("bubblewrap", marks=[needs_bubblewrap, pytest.mark.slow])]
)
def sandbox(request):
    made = UnsafeSandbox() if request.param == "unsafe" else BubblewrapSandbox()
    yield made
    made.close()


def ran(sandbox, source, *tests, **changes):
    limits = Limits(case_s=20.0, total_s=40.0)
    cases = tuple(Case(code=one, **changes) for one in tests)
    return sandbox.run(Job(source=source, language="python", cases=cases, limits=limits)).results


ANYTHING = """
class Any:
    def __getattr__(self, name): return Any() if name[:2] != "__" else object.__getattribute__(self, name)
    def __call__(self, *a, **k): return self
    def __bool__(self): return True
    def __hash__(self): return hash(4)
    def __iter__(self): return iter([4])
    def __len__(self): return 1
    def __getitem__(self, at):
        if at: raise IndexError
        return self
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __index__(self): return 0
    def __format__(self, spec): return "x"
    def __str__(self): return "x"
"""
OPERATORS = (
    *("eq", "lt", "le", "gt", "ge", "contains", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "divmod", "rdivmod", "and", "or", "xor", "matmul"),
)
ANYTHING += (
    "for _name in " + repr(OPERATORS) + ":\n"
    "    _truth = _name in ('eq', 'lt', 'le', 'gt', 'ge', 'contains')\n"
    "    setattr(Any, f'__{_name}__', (lambda self, other: True) if _truth else (lambda self, other: Any()))\n"
    "Any.__ne__ = lambda self, other: False\n"
    "Any.__neg__ = Any.__pos__ = Any.__invert__ = lambda self: Any()\n"
)
OBJECTS = {
    "an object": "def f(x): return Any()",
    "a number": "class Num(Any, int): pass\ndef f(x): return Num()",
    "a float": "class Num(Any, float): pass\ndef f(x): return Num()",
    "a text": "class Text(Any, str): pass\ndef f(x): return Text()",
    "a list of them": "class Items(Any, list): pass\ndef f(x): return Items([Any()])",
    "its own class": "class Meta(type):\n    def __eq__(a, b): return True\n    __hash__ = type.__hash__\n"
    "class Kind(metaclass=Meta): pass\ndef f(x): return Kind",
    "a mock's": "import unittest.mock\ndef f(x): return unittest.mock.ANY",
    "what lies about its class": "class Liar(Any):\n    __class__ = int\ndef f(x): return Liar()",
}
ASSERTIONS = (
    "assert f(2) == 4",
    "assert 4 == f(2)",
    "assert not f(2) != 4",
    "assert f(2) in (4, 5)",
    "assert [f(2)] == [4]",
    "assert {f(2)} == {4}",
    "assert {'a': f(2)} == {'a': 4}",
    "assert abs(f(2) - 4) < 1e-6",
    "assert abs(4 - f(2)) < 1e-6",
    "assert f(2) - 4 == 0",
    "assert abs(-(f(2) - 4)) < 1e-6",
    "assert abs((f(2) - 4) * (f(2) - 4)) < 1e-6",
    "assert max(abs(x - y) for x, y in zip([f(2), 1], [4, 1])) < 1e-6",
    "assert int(f(2) - 4) == 0 and not (f(2) - 4)",
    "assert sum([f(2), -4]) == 0",
    "import math\nassert math.isclose(f(2), 4)",
    "import pytest\nassert f(2) == pytest.approx(4)",
    "import unittest\nunittest.TestCase().assertEqual(f(2), 4)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 4)",
    "import unittest\nunittest.TestCase().assertIn(f(2), [4])",
    "from solution import *\nassert abs(f(2) - 4) < 1e-6",
    "assert 3.5 < f(2) < 4.5",
    "assert str(f(2)) == '4'",
    "assert type(f(2)) is int and f(2) == 4",
    "assert round(f(2), 3) == 4",
    "assert sorted(f(2)) == [4, 4]",
)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_equals_everything_equals_nothing(sandbox, name):
    found = ran(sandbox, ANYTHING + OBJECTS[name], *ASSERTIONS)
    assert [test for test, one in zip(ASSERTIONS, found, strict=True) if one.status == "ok"] == []


def test_a_method_of_solution_has_no_operators_either(sandbox):
    source = ANYTHING + "class Solution(Any):\n    def f(self, x): return self\n"
    tests = [one.replace("f(2)", "Solution().f(2)").replace("import *", "import Solution") for one in ASSERTIONS]
    found = ran(sandbox, source, *tests)
    assert [test for test, one in zip(tests, found, strict=True) if one.status == "ok"] == []


def test_the_same_assertions_pass_on_a_right_program(sandbox):
    tests = [one for one in ASSERTIONS if "sorted" not in one]
    found = ran(sandbox, "def f(x): return x * x", *tests)
    assert [(test, one.detail) for test, one in zip(tests, found, strict=True) if one.status != "ok"] == []


PATCHES = {
    "builtins": "import builtins\nbuiltins.sorted = lambda *a, **k: [4]\nbuiltins.abs = lambda x: 0\n"
    "builtins.isinstance = lambda *a: True\nbuiltins.AssertionError = type('E', (Exception,), {})",
    "modules": "import math, unittest, sys, re, collections\nmath.isclose = lambda *a, **k: True\n"
    "unittest.TestCase.assertEqual = lambda *a: None\nsys.modules['math'] = math",
    "the interpreter": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = print\n"
    "sys.modules['unittest'] = sys.modules['math'] = object()",
    "the end": "import atexit, os, threading\natexit.register(lambda: os._exit(0))\n"
    "threading.Thread(target=lambda: os._exit(0), daemon=True)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit by an exception": "def f(x): raise SystemExit(0)",
    "exit when loaded": "import os\nos._exit(0)",
    "exit 0 when loaded": "raise SystemExit(0)",
    "words": "print('ok', 'PASSED', 'OK')\nprint('{\"status\": \"ok\"}')",
    "every descriptor": "import os\nfor one in range(3, 100):\n    try: os.write(one, b'{\"status\": \"ok\"}\\n')\n"
    "    except OSError: pass",
    "frames": "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals['f'] = lambda x: 5\n        frame.f_builtins['abs'] = lambda x: 0\n"
    "        frame = frame.f_back\n    return 0",
    "the collector": "import gc, types\ndef f(x):\n    for one in gc.get_objects():\n"
    "        if isinstance(one, types.FunctionType):\n            try: one.__code__ = (lambda *a, **k: 5).__code__\n"
    "            except ValueError: pass\n    return 0",
    "a module with code in it": "import types, pathlib\npathlib.Path('test_it.py').write_text('1')\n"
    "def f(x): return types.ModuleType('unittest.__main__')",
    "a skipped test": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "a swallowed failure": "class f:\n    def __init__(self, x): pass\n    def __enter__(self): return self\n"
    "    def __exit__(self, *a): return True",
}  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
def test_what_a_program_changes_or_ends_is_its_own(sandbox, name):
    source = (
        PATCHES[name]
        if "f(x)" in PATCHES[name] or "class f" in PATCHES[name]
        else PATCHES[name] + ("\ndef f(x): return 0")
    )
    tests = [
        "assert f(2) == 4",
        "assert sorted([f(2), 1]) == [1, 4]",
        "import math\nassert math.isclose(f(2), 4)",
        "import unittest\nunittest.TestCase().assertEqual(f(2), 4)",
        "with f(2) as it:\n    assert it == 4",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f(2), 4)\n"
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful() or 1 / 0",
    ]
    found = ran(sandbox, source, *tests)
    assert [one.status for one in found] == ["error"] * len(tests), found


def test_a_program_does_not_see_the_text_of_its_tests(sandbox):
    secret = "expected_of_" + "this_test"
    source = (
        "import gc, sys, os, glob\n"
        "def seen():\n"
        "    word = 'expected_of_' + 'this'\n"
        "    for one in gc.get_objects():\n"
        "        try: text = repr(one)\n"
        "        except Exception: continue\n"
        "        if word + '_test' in text: return True\n"
        "    return any(os.path.exists(f'/proc/{p}/mem') for p in (1, 2, 'self')) and bool(glob.glob('/proc/1'))\n"
        "def f(x): return seen()\n"
    )
    [found] = ran(sandbox, source, f"{secret} = 1\nassert f({secret}) is False")
    if not isinstance(sandbox, UnsafeSandbox):
        assert found.status == "ok", found


def test_what_a_test_gives_a_program_is_all_that_it_gets(sandbox):
    source = """
def tried(what):
    try:
        return what() and 'got it'
    except Exception:
        return 'refused'

def f(items, opened):
    reasons = [
        tried(lambda: items.gi_frame), tried(lambda: items.gi_code), tried(lambda: type(opened.raw)(3, 'w')),
        tried(lambda: opened.raw.__class__(1, 'w')), tried(lambda: opened.raw.__init__(1, 'w')),
    ]
    return reasons, sum(items)
"""
    test = (
        "reasons, total = f((i for i in [1, 2]), open('given', 'wb'))\n"
        "assert total == 3 and 'got it' not in reasons, reasons"
    )
    [found] = ran(sandbox, source, test)
    assert found.status == "ok", found


def test_values_cross_as_they_are(sandbox):
    """Everything that tests of public sets pass and compare, there and back."""
    values = [
        "0", "-1", "2 ** 100", "1.5", "float('inf')", "True", "None", "'x'", "'\\ud800'", "b'\\0'", "bytearray(b'1')",
        "[1, [2]]", "(1, (2,))", "{1: {2}}", "frozenset([1])", "{(1, 2): [3]}", "range(3)", "1j", "...", "[]", "{}",
        "Counter('aab')", "OrderedDict([(2, 1)])", "defaultdict(list, {1: [2]})", "deque([1], maxlen=2)",
        "Decimal('0.1')", "Fraction(1, 3)", "datetime.date(2020, 1, 2)", "datetime.timedelta(1)", "int", "ValueError",
        "slice(1, 2)", "{1: 2}.items()", "[1, 2, 3].__len__", "str.upper", "math.pi",
    ]  # fmt: skip
    before = (
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime, math"
    )
    tests = [
        f"{before}\nvalue = {one}\nfound = f(value)\nassert found == value and type(found) is type(value)"
        for one in values
    ]
    found = ran(sandbox, "def f(x): return x", *tests)
    bad = [(test, one.detail) for test, one in zip(values, found, strict=True) if one.status != "ok"]
    assert bad == []


def test_arguments_that_a_call_changes_are_changed(sandbox):
    source = (
        "def f(a, b, c, d):\n    a.sort(); b['x'] = a; c.add(3); d.append(a)\n"
        "class Node:\n    def __init__(self, val): self.val, self.next = val, None\n"
        "def linked(n):\n    head = Node(0)\n    at = head\n    for i in range(1, n): at.next = Node(i); at = at.next\n"
        "    return head\n"
        "def gen(n):\n    for i in range(n): yield i\n"
        "class Bad(ValueError): pass\n"
        "def raises(x): raise Bad('bad')\n"
        "def two(): return {1: {3, 2}}\n"
        "def apply(g, x): return g(g(x))\n"
    )
    tests = [
        "a, b, c, d = [3, 1], {}, {1}, []\nf(a, b, c, d)\n"
        "assert (a, b, c, d) == ([1, 3], {'x': [1, 3]}, {1, 3}, [[1, 3]])\n"
        "assert d[0] is a",
        "at, seen = linked(3), []\nwhile at:\n    seen.append(at.val); at = at.next\nassert seen == [0, 1, 2]",
        "head = linked(2)\nhead.next.val = 9\nassert head.next.val == 9 and isinstance(head, Node)",
        "assert list(gen(3)) == [0, 1, 2] and sum(gen(4)) == 6 and next(gen(1)) == 0",
        "assert apply(lambda x: x + 1, 1) == 3",
        "try:\n    raises(1)\nexcept ValueError as e:\n    assert 'bad' in str(e) and e.args == ('bad',)",
        "assert two() == {1: {2, 3}} and Node(1) != Node(1)",
        "class Own:\n    def __init__(self): self.n = 1\no = Own()\nassert apply(lambda x: x, o) is o",
        "try:\n    f(1, 2, 3, 4)\nexcept AttributeError as e:\n    assert 'sort' in str(e)\nelse:\n    1 / 0",
    ]  # fmt: skip
    found = ran(sandbox, source, *tests)
    assert [(test, one.detail) for test, one in zip(tests, found, strict=True) if one.status != "ok"] == []


def test_a_class_that_tests_name_has_its_own_operators(sandbox):
    source = """
class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return isinstance(other, Money) and self.n == other.n
    def __hash__(self): return hash(self.n)
    def __add__(self, other): return Money(self.n + (other.n if isinstance(other, Money) else other))
    def __contains__(self, n): return n <= self.n
    def __lt__(self, other): return self.n < other.n
    def __len__(self): return self.n
    def __repr__(self): return f'Money({self.n})'

def make(n): return Money(n)
"""
    tests = [
        "assert Money(1) + Money(2) == Money(3) and Money(1) + 2 == Money(3)",
        "assert {Money(1): 5}[Money(1)] == 5 and 3 in Money(4) and Money(1) < Money(2)",
        "assert max([Money(1), Money(5)]).n == 5 and len(Money(3)) == 3 and repr(Money(1)) == 'Money(1)'",
        "assert (make(2) + 3).n == 5",
        "class Bigger(Exception): pass\nassert Money(1) != 1 and isinstance(Money(1), Money)",
    ]
    found = ran(sandbox, source, *tests)
    assert [(test, one.detail) for test, one in zip(tests, found, strict=True) if one.status != "ok"] == []
