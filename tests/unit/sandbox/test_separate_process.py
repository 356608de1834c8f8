"""What objects of a program decide in the process of its tests, and which changes reach them."""

import pytest

from gtpo_megatron.sandbox.choose import UnsafeSandbox
from gtpo_megatron.sandbox.protocol import Case, Job, Limits

SEPARATE = "import gc\n"


@pytest.fixture(scope="module")
def sandbox():
    made = UnsafeSandbox()
    yield made
    made.close()


def ran(sandbox, source, *tests):
    cases = tuple(Case(code=one) for one in tests)
    limits = Limits(case_s=20.0, total_s=60.0)
    outcome = sandbox.run(Job(source=SEPARATE + source, language="python", cases=cases, limits=limits))
    assert outcome.separate_process
    return outcome.results


def check_passes(sandbox, source, *tests):
    found = ran(sandbox, source, *tests)
    assert [(test, one.detail) for test, one in zip(tests, found, strict=True) if one.status != "ok"] == []


def check_fails(sandbox, source, *tests):
    found = ran(sandbox, source, *tests)
    assert [test for test, one in zip(tests, found, strict=True) if one.status != "error"] == []


EQUAL = """
class NAME:
    def __init__(self, *_): pass
    def __eq__(self, other): return True
    def __hash__(self): return hash(4)
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __lt__(self, other): return True
    def __contains__(self, other): return True
    def __iter__(self): return iter([])
"""
CHECKS = ("{} == 4", "4 == {}", "abs({} - 4) < 1e-6", "{} in [4]", "4 in {}", "{{{}}} == {{4}}")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("f", "f(2)"),
        ("Solution", "Solution()"),
        ("Check_Vow", "Check_Vow('ab')"),
        ("solution", "solution(2)"),
    ],
)
def test_a_class_in_place_of_a_function_decides_nothing(sandbox, name, call):
    checks = [f"assert {one.format(call)}" for one in CHECKS]
    bound = [f"found = {call}\nassert {one.format('found')}" for one in CHECKS]
    starred = [f"from solution import *\n{one}" for one in checks + bound]
    named = [f"import solution\n{one.replace(call, f'solution.{call}')}" for one in checks]
    check_fails(sandbox, EQUAL.replace("NAME", name), *checks, *bound, *starred, *named)


def test_a_function_whose_name_looks_like_that_of_a_class_is_none(sandbox):
    tests = ["assert Extract(2) == 4", "assert sorted(Extract(2)) == [4]", "assert not Extract(2) != 4"]
    check_fails(sandbox, EQUAL.replace("NAME", "Extract"), *tests)


def test_a_class_that_the_tests_name_does_not_help_a_function(sandbox):
    source = EQUAL.replace("NAME", "Money") + (
        "class Meta(type):\n    def __call__(cls, *_): return Money()\nclass f(metaclass=Meta): pass\n"
        "g = Money\nkept = Money()\ndef h(x): return kept\nclass Other: m = staticmethod(Money)\n"
        "Money.add = lambda self: kept\nMoney.again = property(lambda self: h)\n"
    )
    before = "m = Money(1)\nm.add\n"
    tests = [
        "assert f(2) == 4",
        "assert g(2) == 4",
        "assert h(2) == 4",
        "m.add()\nassert h(2) == 4",
        "x = h(2)\nm.add()\nassert x == 4",
        "x = m.add()\nh(2)\nassert x == 4",
        "m.again\nassert h(2) == 4",
        "k = h\nm.again\nassert k(2) == 4",
        "m.again(2)\nassert h(2) == 4",
        "from solution import *\nassert f(2) == 4",
    ]
    check_fails(sandbox, source, *(before + one for one in tests))


def test_names_that_the_tests_only_import_or_write_down_are_no_classes(sandbox):
    source = EQUAL.replace("NAME", "TestCase") + "def f(x): return TestCase()\n"
    tests = [
        "import unittest\nfrom solution import *\nunittest.TestCase\nassert 4 in f(2)",
        "from solution import *\n# TestCase\n'TestCase'\nassert 4 in f(2)",
        "from solution import f, TestCase\nassert 4 in f(2)",
    ]
    check_fails(sandbox, source, *tests)


def test_a_mock_of_the_tests_keeps_its_checks(sandbox):
    source = """
def tried(do):
    try: do()
    except Exception: pass

def f(cb, fake):
    def no(*a, **k): return None
    tried(lambda: setattr(cb, "assert_called_once_with", no))
    tried(lambda: setattr(cb, "called", True))
    tried(lambda: setattr(cb, "call_count", 1))
    tried(lambda: setattr(cb, "save", no))
    tried(lambda: setattr(cb, "mock_calls", [1]))
    tried(lambda: cb.configure_mock(**{"assert_called_once_with": no}))
    tried(lambda: delattr(cb, "assert_called_once_with"))
    tried(lambda: cb.reset_mock())
    tried(lambda: setattr(fake, "check", no))
    tried(lambda: setattr(fake, "assert_it", no))
    tried(lambda: setattr(fake, "called", True))
    fake.seen = cb.seen = 3
"""
    before = "from unittest.mock import Mock\nclass Fake:\n    def check(self): assert False\n    called = False\n"
    before += "cb, fake = Mock(), Fake()\nf(cb, fake)\n"
    checks = [
        "cb.assert_called_once_with(3)", "assert cb.called", "assert cb.call_count == 1", "cb.save.assert_called()",
        "assert cb.mock_calls", "fake.check()", "fake.assert_it()", "assert fake.called",
    ]  # fmt: skip
    check_fails(sandbox, source, *(before + one for one in checks))
    check_passes(sandbox, source, before + "assert fake.seen == cb.seen == 3")


def test_star_gives_no_name_of_a_module_or_of_pytest(sandbox):
    source = """
class np:
    allclose = staticmethod(lambda *a, **k: True)
pytest = unittest = mock = math = np
def setup_module(): pass
def pytest_runtest_setup(): pass
def f(x): return 0
"""
    names = ("np", "pytest", "unittest", "mock", "math", "setup_module", "pytest_runtest_setup")
    test = f"from solution import *\nassert f(2) == 0 and not set({names}) & set(globals())"
    check_passes(sandbox, source, test)
    check_passes(sandbox, "import math\ndef f(x): return 0\n", "from solution import *\nassert math.pi > f(2)")


MONEY = """
class Money:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == (other.n if isinstance(other, Money) else other)
    def __hash__(self): return hash(self.n)
    def __add__(self, other): return Money(self.n + (other.n if isinstance(other, Money) else other))
    __radd__ = __add__
    def __iadd__(self, other): self.n += other; return self
    def __matmul__(self, other): return Money(self.n * other.n)
    def __lt__(self, other): return self.n < (other.n if isinstance(other, Money) else other)
    def __neg__(self): return Money(-self.n)
    def __enter__(self): return self
    def __exit__(self, *a): pass
    def plus(self, n): self.n += n; return self
    def bump(self): return Money(self.n + 1)

class Bigger(Money):
    def smaller(self): return Money(self.n)
"""


def test_what_operators_of_a_made_object_return_is_made(sandbox):
    check_passes(
        sandbox,
        MONEY,
        "m = Money(3)\nm += 2\nassert m == 5",
        "assert Money(3) + 2 == 5 and 2 + Money(3) == 5 and Money(3) + 2 + 1 == 6",
        "assert Money(2) @ Money(3) == 6 and -Money(3) == -3 and sum([Money(1), Money(2)]) == 3",
        "assert max([Money(1), Money(3)]) == 3 and sorted([Money(3), Money(1)])[0] == 1",
        "import copy\nassert copy.copy(Money(3)) == 3 and copy.deepcopy(Money(3)) == 3",
        "m = Money(3)\nassert m < 4 and m == 3",
    )


def test_nothing_else_is_made(sandbox):
    source = MONEY + "kept = Money(4)\ndef f(x): return kept\ndef g(m): return m\nMoney.other = property(f)\n"
    check_fails(
        sandbox,
        source,
        "m = Money(3)\nassert f(2) == 4",
        "m = Money(4)\nassert g(m) == 4",
        "m = Money(4)\ng(m)\nassert m == 4",
        "m = Money(3)\nassert m.other == 4",
        "m = Money(3)\nassert f(2) + 0 == 4",
        "m = Money(3)\nassert f(2).bump() == 5",
        "assert Money(3).bump() == 4",
        "m = Money(3)\nm.plus(2)\nassert m == 5",
        "assert isinstance(Money(3), Money) and Bigger(3).smaller() == 3",
        "assert isinstance(Money(3), Money) and Money(3) + g(Money(1)) == g(Money(4)).n + g(Money(5))",
    )


LIAR = (
    EQUAL.replace("NAME", "Account")
    + """
    def balance(self): return self
    def __getattr__(self, name): return lambda *a, **k: Account()
    def __add__(self, other): return Account()
    def __getitem__(self, at): return self
"""
)


def test_what_methods_of_a_class_that_equals_everything_return_is_equal_to_no_value(sandbox):
    values = ("4", "0.5", "'ab'", "[1, 'b']", "(1, 2)", "{'a': 1}", "{1, 2}", "[]", "''", "[[0, 1], [2, 3]]", "-1")
    made = ("Account().balance()", "Account().get('a')", "Account()['a']", "Account().get")
    tests = [f"isinstance(Account(), Account)\nassert {one} == {value}" for one in made for value in values]
    check_fails(sandbox, LIAR, *tests, *(test.replace(" == ", " in [0, ") + "]" for test in tests[:3]))


def test_what_is_equal_to_some_values_is_equal_to_them(sandbox):
    source = """
class Box:
    def __init__(self, value): self.value = value
    def __eq__(self, other):
        if isinstance(other, str) and "!" in other: raise ValueError
        return self.value == (other.value if isinstance(other, Box) else other)
"""
    values = ("4", "0.5", "'ab'", "'A1'", "[1, 'b']", "(1, 2)", "{'a': 1}", "{1, 2}", "[]", "''", "{}", "None", "True")
    tests = [f"assert Box({one}).value == {one} and Box({one}) == {one} and {one} == Box({one})" for one in values]
    check_passes(
        sandbox, source, *tests, "Box(1).value\nassert Box(1) != 2 and Box(1) == Box(1) and Box([Box(1)]) == [1]"
    )


SHELF = """
import collections
cache, seen = {}, []
class Shelf:
    shared = []
    def __init__(self):
        self.items, self.by_name, self.tags = [1], {"a": 1}, {1}
        self.queue, self.grid, self.raw = collections.deque([1]), [[0, 0], [0, 0]], bytearray(b"1")
        self.tree = {"a": {"b": [1]}}
        self.shelves = [Node(1), Node(2)]
        self.points = [Point(1, 2), Point(3, 4)]
    def sums(self): return sum(self.items), self.grid[0][1], sorted(self.tags), dict(self.by_name)
    def add(self, x): self.items.append(x); self.grid[0][0] = x
    def replace(self): self.items = [9]
    def kinds(self): return [type(one).__name__ for one in self.points]
    def same(self, items): return items is self.items
class Node:
    def __init__(self, n): self.n = n
Point = collections.namedtuple("Point", "x y")
def cached(x): return cache.get(x)
def call(back): return back()
"""


@pytest.mark.slow
def test_collections_that_tests_read_are_the_programs(sandbox):
    before = "s = Shelf()\n"
    check_passes(
        sandbox,
        SHELF,
        before + "s.items.append(4)\ns.items.append(5)\nassert s.sums()[0] == 10 and s.items == [1, 4, 5]",
        before + "s.by_name['b'] = 2\ns.tags.add(2)\ns.tags.discard(1)\nassert s.sums()[2:] == ([2], {'a': 1, 'b': 2})",
        before + "s.queue.append(2)\ns.raw += b'2'\nassert list(s.queue) == [1, 2] and s.raw == b'12'",
        before + "s.grid[0][1] = 2\nassert s.sums()[1] == 2 and s.grid == [[0, 2], [0, 0]]",
        before + "row = s.grid[0]\ns.add(3)\nrow[1] = 2\nassert s.grid == [[3, 2], [0, 0]] and row == [3, 2]",
        before + "s.tree['a']['b'].append(2)\ns.tree['c'] = [1]\ns.tree['c'].append(3)\n"
        "assert s.tree == {'a': {'b': [1, 2]}, 'c': [1, 3]}",
        before + "new = [1]\ns.grid.append(new)\nassert len(s.grid) == 3\nnew.append(2)\nassert s.grid[2] == [1, 2]",
        before + "items = s.items\ns.add(2)\nassert items == [1, 2] and s.items is items\nitems.append(3)\n"
        "assert s.sums()[0] == 6",
        before + "old = s.items\ns.replace()\nassert s.items == [9] and old == [1]\nold.append(2)\n"
        "assert s.items == [9]",
        before + "assert s.same(s.items) and not s.same([1])",
        before + "s.items.clear()\nassert s.sums()[0] == 0 and Shelf().items == [1]",
        "import solution\nsolution.cache['a'] = 1\nassert cached('a') == 1\nsolution.cache.clear()\n"
        "assert not cached('a')",
        "cache[2] = 3\nassert cached(2) == 3",
        "Shelf.shared.append(1)\nassert Shelf.shared == [1] and Shelf().shared == [1]\nShelf.shared.clear()",
        before + "s.shelves.reverse()\nassert [one.n for one in s.shelves] == [2, 1]\ns.shelves.pop()\n"
        "assert len(s.shelves) == 1 and isinstance(s.shelves[0], Node)",
        before + "s.points.reverse()\ns.points.pop()\nassert s.kinds() == ['Point'] and s.points[0].x == 3",
        before + "items = s.items\ndef back():\n    items.append(5)\n    return s.sums()[0]\nassert call(back) == 6",
        before + "from unittest import mock\nimport solution\nwith mock.patch.dict(solution.cache, {7: 8}):\n"
        "    assert cached(7) == 8\nassert cached(7) is None",
        before + "import copy\nmine = copy.copy(s.items)\nmine.append(2)\nassert s.items == [1]",
        "shelves = [Shelf() for _ in range(1100)]\nfor one in shelves: one.items.append(1)\n"
        "assert all(one.sums()[0] == 2 for one in shelves) and shelves[0].items == [1, 1]",
    )


def test_a_collection_that_was_read_is_still_compared_by_value(sandbox):
    source = SHELF + EQUAL.replace("NAME", "Any") + "def f(x): return Any()\n"
    check_fails(
        sandbox,
        source,
        "s = Shelf()\ns.items.append(f(2))\nassert s.items == [1, 4]",
        "s = Shelf()\ns.by_name['b'] = f(2)\nassert s.by_name == {'a': 1, 'b': 4}",
    )
