"""The tests of a programming problem, read from a row's columns in the shapes that data sets have.

======================================  ===================================================================
column                                  shape
======================================  ===================================================================
``tests``, ``test_cases``,              ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls;
``input_output``, ``ground_truth``,     or a list of ``{"input": ..., "output": ...}``; or a list of
``unit_tests``, ``official_tests``,     assertions; each of them also as JSON text
``reward_model.ground_truth``
``verification_info``                   ``{"language": ..., "test_cases": [...]}``, which are as ``tests``
``public_tests``, ``private_tests``,    ``{"input": [...], "output": [...]}`` (CodeContests)
``generated_tests``
``public_test_cases``,                  as ``tests``, the second also packed as LiveCodeBench has it; ``metadata``
``private_test_cases``                  has the function's name
``test_list`` (with ``test_imports``,   assertions (MBPP)
``test_setup_code``)
``test`` with ``entry_point``           a function ``check`` (HumanEval)
``tests`` and its like                  a text of Python: assertions, functions ``test_...``, cases of unittest
                                        (KodCode); also under a key: ``{"functional": ...}``
======================================  ===================================================================
"""

import base64
import binascii
import json
import math
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.stubs import kinds_in
from gtpo_megatron.rewards.written_tests import cases_of_text
from gtpo_megatron.sandbox.protocol import Case
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

COLUMNS = (
    *("tests", "test_cases", "input_output", "ground_truth", "unit_tests", "official_tests", "verification_info"),
)
GROUPS = ("public_tests", "private_tests", "generated_tests", "public_test_cases", "private_test_cases")

TEXTS = (
    *("functional", "unit_tests", "unittest", "assertions", "asserts", "assert"),
    *("tests", "test_code", "test", "code"),
)
"""Keys under which a column of tests has a text or a list of texts."""

MAX_UNPACKED_BYTES = 256 << 20

LIVECODEBENCH = "livecodebench"
"""In the column ``comparison``: outputs and values are compared as its own grader does."""

_DURATION = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:(ms|milliseconds?|s|secs?|seconds?)(?:\W.*)?)?", re.IGNORECASE | re.DOTALL
)

_OTHER_ANSWERS = ("generated_checker", "interaction_format")
"""Columns of open-r1/codeforces for problems with several right outputs, or with a judge that answers."""

_CODE = re.compile(r"\bassert|^\s*(?:def|class|import|from)\s|\w\(", re.MULTILINE)
"""What tells a text of Python from a packed one."""

_LANGUAGES = {"python": "python", "python3": "python", "py": "python", "cpp": "cpp", "c++": "cpp", "cc": "cpp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTest:
    """One test.

    Attributes:
        case: case to run the program on.
        output: expected standard output; None if something else is expected.
        value: expected returned value as JSON; None if something else is expected.
        comparison: name of the comparison: "" is ours, else :data:`LIVECODEBENCH`.
    """

    case: Case
    output: str | None = None
    value: str | None = None
    comparison: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTests:
    """All tests of a problem.

    Attributes:
        tests: tests, at least one.
        language: language of the programs.
        entry_point: function that the tests call; "" if they use standard input.
        stub: beginning of a program that the problem gives, for programs that lack it.
        case_s: seconds per test; 0: not stated.
        comparison: name of the tests' comparison, see :class:`ProgramTest`.
        prelude: as in ``Job``.
        modules: likewise.
    """

    tests: tuple[ProgramTest, ...]
    language: str = "python"
    entry_point: str = ""
    stub: str = ""
    case_s: float = 0.0
    comparison: str = ""
    prelude: str | None = None
    modules: tuple[tuple[str, str], ...] = ()


def tests_of(columns: Mapping[str, Any]) -> ProgramTests:
    """Reads the tests of a row.

    Raises:
        DataError: there are none, or they have another shape, or a language is unknown.
    """
    function = _function_name(columns)
    found = _tests_of_columns(columns, _RowNames(function, _entry_point(columns, function)))
    if not found:
        raise DataError(
            f"no tests: expected one of the columns {', '.join((*COLUMNS, *GROUPS))}, test_list or test; the row has "
            f"{printable(', '.join(columns)) or 'none'}"
        )
    language = str(columns.get("language") or _nested(columns, "verification_info", "language") or "python").lower()
    if language not in _LANGUAGES:
        raise DataError(f"language is {shown(language)}; expected python or cpp")
    is_python = _LANGUAGES[language] == "python"
    if not is_python and any(test.case.stdin is None for test in found):
        raise DataError("tests of C++ programs must have input and output; calls and assertions are for Python")
    comparison = str(columns.get("comparison") or "")
    if comparison not in ("", LIVECODEBENCH):
        raise DataError(f"comparison is {shown(comparison)}; expected {LIVECODEBENCH}, or no such column")
    called = next((test.case.function for test in found if test.case.function), "")
    stub = _stub(columns)
    return ProgramTests(
        tests=tuple(_as_compared(test, comparison, stub) for test in found),
        language=_LANGUAGES[language],
        entry_point=called or str(columns.get("entry_point") or ""),
        stub=stub if is_python else "",
        case_s=_seconds(columns.get("time_limit")),
        comparison=comparison,
        prelude=_prelude(columns.get("prelude")),
        modules=_modules(columns.get("modules")),
    )


def _stub(columns: Mapping[str, Any]) -> str:
    return str(columns.get("stub") or columns.get("starter_code") or "")


def _as_compared(test: ProgramTest, comparison: str, stub: str) -> ProgramTest:
    """A test with what the row says of its comparison, and of its arguments that are nodes."""
    case = test.case
    if case.function:
        case = replace(case, kinds=kinds_in(stub, case.function), is_exact=comparison == LIVECODEBENCH)
    return replace(test, case=case, comparison=comparison)


def _seconds(limit: Any) -> float:
    """A time limit: a number, a text such as ``2.0 seconds``, or ``{"seconds": 2, "nanos": 0}`` (CodeContests)."""
    if isinstance(limit, Mapping) and limit.keys() & {"seconds", "nanos"}:
        seconds, nanos = (limit.get(name) or 0 for name in ("seconds", "nanos"))
        limit = seconds + nanos / 1e9 if isinstance(seconds, int | float) and isinstance(nanos, int | float) else limit
    if isinstance(limit, str) and (found := _DURATION.fullmatch(limit)):
        limit = float(found[1]) / (1000 if (found[2] or "").lower().startswith("m") else 1)
    if limit in (None, "", 0):
        return 0.0
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise DataError(f"time_limit is {shown(limit)}; expected seconds, such as 2, '2 seconds' or {{'seconds': 2}}")
    return float(limit)


@dataclass(frozen=True, slots=True)
class _RowNames:
    """Names that a row's program must define.

    Attributes:
        function: name of the function that calls are made of; "" if none is named.
        entry_point: an expression for what ``check`` is called with; "" if nothing is named.
    """

    function: str
    entry_point: str


def _modules(value: Any) -> tuple[tuple[str, str], ...]:
    """Modules that the row brings along: their texts by name, or a list of such objects' ``name`` and ``text``."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, "modules", half_pairs=True)
    if not value:
        return ()
    if isinstance(value, list) and all(isinstance(one, Mapping) and {"name", "text"} <= one.keys() for one in value):
        value = {str(one["name"]): one["text"] for one in value}
    if not isinstance(value, Mapping):
        raise DataError(f"modules is {shown(value)}; expected texts of Python by the names of the modules")
    found = []
    for given, text in value.items():
        name = str(given).removesuffix(".py")
        if text is None:  # Parquet has every row's keys in each
            continue
        if not name.isidentifier() or not isinstance(text, str):
            raise DataError(f"modules has {shown(given)}: {shown(text)}; expected a name of a module and its text")
        try:
            compile(text, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise DataError(f"modules: {name} is no Python: {printable(error)}") from error
        found.append((name, text))
    return tuple(found)


def _prelude(value: Any) -> str | None:
    if value is None:
        return None
    try:
        compile(str(value), "prelude", "exec")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"prelude is no Python: {printable(error)}; expected imports and definitions") from error
    return str(value)


def _nested(columns: Mapping[str, Any], name: str, key: str) -> Any:
    """A value in a column that is an object, or the JSON text of one."""
    value = columns.get(name)
    if isinstance(value, str) and value.strip().startswith("{"):
        value = parse_json(value, name, half_pairs=True)
    return value.get(key) if isinstance(value, Mapping) else None


def _tests_of_columns(columns: Mapping[str, Any], names: _RowNames) -> list[ProgramTest]:
    truth = _nested(columns, "reward_model", "ground_truth")
    if columns.get("official_tests"):
        _check_one_answer(columns)
    if isinstance(columns.get("test"), str) and columns["test"].strip() and columns.get("entry_point"):
        return _tests_of_text(
            columns["test"], "test", names
        )  # beside it LeetCodeDataset has examples that are no input
    for name, value in (*((name, columns.get(name)) for name in COLUMNS), ("reward_model.ground_truth", truth)):
        if found := _tests_of_column(value, name, names):
            return found
    if columns.get("test_list"):
        before = [*_texts(columns.get("test_imports"), "test_imports"), str(columns.get("test_setup_code") or "")]
        setup = "\n".join(line for line in before if line)
        codes = _texts(columns["test_list"], "test_list")
        return [test for code in codes for test in _tests_of_text(f"{setup}\n{code}", "test_list", names)]
    if isinstance(columns.get("test"), str) and columns["test"].strip():
        return _tests_of_text(columns["test"], "test", names)
    return [test for name in GROUPS for test in _tests_of_column(columns.get(name), name, names)]


def _check_one_answer(columns: Mapping[str, Any]) -> None:
    """Refuses a problem of open-r1/codeforces whose right outputs are not known by one output for each input."""
    for name in _OTHER_ANSWERS:
        if columns.get(name):
            raise DataError(f"{name} says that more than one output is right, or that a judge answers; it is not run")
    if columns.get("input_mode") == "file":
        raise DataError("input_mode is 'file'; expected stdio: programs read standard input")


def _tests_of_column(value: Any, name: str, names: _RowNames) -> list[ProgramTest]:
    """The tests in one column; none if it is empty in any way."""
    if isinstance(value, str):
        value = _from_text(value, name)
    if value in (None, "", [], {}):
        return []
    if isinstance(value, Mapping):
        return _tests_of_lists(value, name, names)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [test for one in value if one.strip() for test in _tests_of_text(one, name, names)]
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return [_test_of_pair(one, f"{name}[{index}]", names.function) for index, one in enumerate(value)]
    raise DataError(f"{name} is {shown(value)}; expected inputs with outputs, or assertions")


def _from_text(text: str, name: str) -> Any:
    """JSON, or assertions, or JSON that is packed as LiveCodeBench does."""
    given, text = text, text.strip()
    if text in ("", "null", "None"):
        return None
    if text[:1] in ("[", "{"):
        return parse_json(text, name, half_pairs=True)
    if _CODE.search(text):
        return [given]
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        # a pickled text, which is read without executing the pickle
        plain = next(one for _, one, _ in pickletools.genops(packed) if isinstance(one, str))
        return parse_json(plain, name, half_pairs=True)
    except (binascii.Error, zlib.error, ValueError, StopIteration) as error:
        raise DataError(f"{name} is {shown(text)}; expected JSON or assertions") from error


def _tests_of_lists(value: Mapping[str, Any], name: str, names: _RowNames) -> list[ProgramTest]:
    """``{"inputs": [...], "outputs": [...]}`` and its relatives, or a text of tests under a key."""
    function = str(value.get("fn_name") or value.get("function") or names.function)
    if "test_cases" in value:
        return _tests_of_column(value["test_cases"], f"{name}.test_cases", replace(names, function=function))
    inputs = value.get("inputs", value.get("input"))
    outputs = value.get("outputs", value.get("output"))
    if inputs is None and outputs is None:
        texts = {key: value[key] for key in TEXTS if value.get(key) not in (None, "", [], {})}
        if texts:
            return [test for key, text in texts.items() for test in _tests_of_column(text, f"{name}.{key}", names)]
        if {"inputs", "outputs", "input", "output", *TEXTS} & value.keys():
            return []
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise DataError(f"{name} has the keys {shown(', '.join(value))}; expected lists of inputs and outputs")
    if len(inputs) != len(outputs):
        raise DataError(f"{name} has {len(inputs)} inputs and {len(outputs)} outputs; expected an output for each")
    pairs = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    return [_test_of_pair(pair, f"{name}[{index}]", function) for index, pair in enumerate(pairs)]


def _test_of_pair(pair: Mapping[str, Any], where: str, function: str) -> ProgramTest:
    """One test with ``input`` and ``output``, or ``function``, ``arguments`` and ``expected``.

    DeepCoder names the function in the ``metadata`` of each test.
    """
    function = str(pair.get("function") or pair.get("fn_name") or _function_name(pair) or function)
    given = pair.get("input", pair.get("arguments", pair.get("args")))
    wanted = pair.get("output", pair.get("expected", pair.get("expected_output")))
    if wanted is None and not ("output" in pair and function):
        raise DataError(f"{where} has no output; it has {shown(', '.join(pair))}")
    kind = pair.get("testtype", pair.get("type"))
    if kind in ("functional", "function_call") and not function:
        raise DataError(f"{where} calls a function, and nothing says which; expected fn_name, or func_name in metadata")
    is_call = bool(function) and kind not in ("stdin", "stdin_stdout")
    if not is_call:
        return ProgramTest(case=Case(stdin=_joined(given, where)), output=_joined(wanted, where))
    arguments = given if isinstance(given, list) else _lines_of_json(given, where)
    expected = _lines_of_json(wanted, where)[0] if isinstance(wanted, str) and isinstance(given, str) else wanted
    return ProgramTest(case=Case(function=function, arguments=json.dumps(arguments)), value=json.dumps(expected))


def _lines_of_json(value: Any, where: str) -> list[Any]:
    """Arguments as LiveCodeBench writes them: one line of JSON each."""
    if not isinstance(value, str):
        raise DataError(f"{where}: arguments are {shown(value)}; expected a list")
    return [parse_json(line, where, half_pairs=True) for line in value.splitlines() if line.strip()] or [""]


def _joined(value: Any, where: str) -> str:
    """Standard input or output: text, or a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    if isinstance(value, str | int | float):
        return str(value)
    if value is None:
        return ""
    raise DataError(f"{where} is {shown(value)}; expected text")


def _texts(value: Any, name: str) -> Sequence[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = parse_json(value, name, half_pairs=True) if value.strip().startswith("[") else [value]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f"{name} is {shown(value)}; expected a list of texts")
    return value


def _tests_of_text(code: str, name: str, names: _RowNames) -> list[ProgramTest]:
    return [ProgramTest(case=case) for case in cases_of_text(code, name, entry_point=names.entry_point)]


def _entry_point(columns: Mapping[str, Any], function: str) -> str:
    """Argument of ``check``: ``entry_point`` or the function, of ``Solution`` if the starter code says so."""
    named = str(columns.get("entry_point") or function)
    starter = _stub(columns)
    in_class = re.search(rf"^class Solution\b.*\n[ \t]+def {re.escape(named)}\b", starter, re.MULTILINE | re.DOTALL)
    return f"Solution().{named}" if named.isidentifier() and in_class else named


def _function_name(columns: Mapping[str, Any]) -> str:
    """The function that tests call, where it is beside them."""
    return str(columns.get("fn_name") or _nested(columns, "metadata", "func_name") or "")
