"""Programs for tests of the sandbox, in text files: ``### NAME`` begins one, ``--- tests`` its own tests, if any."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

FOLDER = Path(__file__).parent / "programs"


def programs(name: str) -> dict[str, tuple[str, str]]:
    """Programs and their tests by name, from the file of a kind."""
    parts = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("\n### ")[1:]
    found = {}
    for part in parts:
        title, _, text = part.partition("\n")
        program, _, tests = text.partition("--- tests\n")
        found[title] = (program, tests)
    return found


def one_in_four(names: Iterable[str], *, others: pytest.MarkDecorator) -> list[ParameterSet]:
    """One of four of a kind's programs as it is, the others with a mark."""
    return [pytest.param(name, marks=others if number % 4 else ()) for number, name in enumerate(names)]
