"""Converts the rows of known sets of programming problems; ``rewards/program_tests.py`` reads the tests that they keep.

Only the columns that grading needs are kept: some sets carry gigabytes of solutions.
"""

import re
from collections.abc import Mapping

from gtpo_megatron.config.problems import CODE_TEMPLATE, fill_template
from gtpo_megatron.data.rows import Record, Row, generic_row, optional_text, other_columns, text_field
from gtpo_megatron.errors import DataError


def humaneval_row(record: Record, place: str, source: str) -> Row:
    """HumanEval (arXiv 2107.03374): the beginning of a function, and a function ``check``."""
    stub, entry_point = text_field(record, ("prompt",), place), text_field(record, ("entry_point",), place)
    question = f"Complete the function `{entry_point}`:\n\n```python\n{stub}\n```"
    columns = {"test": record.get("test"), "entry_point": entry_point, "stub": str(record.get("prompt"))}
    return _code_row(question, columns, place, source, optional_text(record, "task_id"))


def mbpp_row(record: Record, place: str, source: str) -> Row:
    """MBPP (arXiv 2108.07732): a sentence and assertions, which the prompt shows, since they name the function."""
    tests = record.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"{place}: test_list is missing or empty; expected a list of assertions")
    question = f"{text_field(record, ('text', 'prompt'), place)}\n\nIt must pass these tests:\n" + "\n".join(
        map(str, tests)
    )
    columns = {name: record.get(name) for name in ("test_list", "test_setup_code", "test_imports")}
    return _code_row(question, columns, place, source, optional_text(record, "task_id"))


def livecodebench_row(record: Record, place: str, source: str) -> Row:
    """LiveCodeBench (arXiv 2403.07974): public tests as JSON, private ones packed."""
    question = text_field(record, ("question_content",), place)
    kept = ("public_test_cases", "private_test_cases", "metadata", "starter_code")
    columns = {name: record.get(name) for name in kept}
    return _code_row(question, columns, place, source, optional_text(record, "question_id"))


def taco_row(record: Record, place: str, source: str) -> Row:
    """TACO (arXiv 2312.14852): ``input_output`` as JSON; its time limit is a text such as ``2.0 seconds``."""
    columns: dict[str, object] = {name: record.get(name) for name in ("input_output", "starter_code", "difficulty")}
    stated = re.match(r"\s*(\d+(?:\.\d+)?)", str(record.get("time_limit") or ""))
    if stated:
        columns["time_limit"] = float(stated[1])
    return _code_row(text_field(record, ("question",), place), columns, place, source, None)


def eurus_row(record: Record, place: str, source: str) -> Row:
    """Eurus-2-RL-Data (arXiv 2502.01456): chat messages; ``reward_model.ground_truth`` has the tests as JSON."""
    return generic_row(record, place, source)


def is_eurus_code(record: Record) -> bool:
    """Whether a row of Eurus-2-RL-Data is a programming problem; the others are mathematics."""
    return record.get("ability") == "code"


def _code_row(question: str, columns: Mapping[str, object], place: str, source: str, row_id: str | None) -> Row:
    """A row whose prompt asks for a program; a given beginning of the program is shown."""
    starter = columns.get("starter_code")
    if isinstance(starter, str) and starter.strip():
        question = f"{question}\n\nBegin with:\n```python\n{starter.rstrip()}\n```"
    if not (isinstance(starter, str) and starter.strip()) and not {"test", "test_list"} & columns.keys():
        question = f"{question}\n\nRead from standard input, and write to standard output."
    kept, extra = other_columns({name: value for name, value in columns.items() if value is not None}, without="")
    return Row(
        place=place,
        prompt=fill_template(CODE_TEMPLATE, question),
        answer="",
        row_id=None if row_id is None else f"{source}-{row_id.rpartition('/')[2]}",
        source=source,
        columns_json=kept,
        extra=extra,
        no_answer=f"{place}: {source} has tests in the place of answers; grade it with --reward.function "
        "gtpo_megatron.rewards.code_tests:code_tests",
    )
