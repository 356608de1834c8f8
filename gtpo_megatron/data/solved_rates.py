"""How often an evaluation's responses solved each problem, by its file of verdicts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import numbered_lines, printable

VERDICTS_FILE = "verdicts.jsonl"
"""Name of that file in an evaluation's folder."""


def read_rates(path: Path, *, success_threshold: float) -> dict[str, tuple[int, int]]:
    """By the id of a problem: correct responses, and those with a verdict.

    Of a response that was graded again the later verdict counts.

    Args:
        path: folder of an evaluation, or its file of verdicts.
        success_threshold: least reward of a correct response.

    Raises:
        ConfigError: there is no such file.
        DataError: it is none of verdicts.
    """
    file = path / VERDICTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"data.pool.verdicts={printable(path)}: no {VERDICTS_FILE}; name the folder that gtpo-megatron evaluate "
            f"has written (--output)"
        )
    rewards: dict[tuple[str, str, int], float | None] = {}
    for fields in _verdicts(file):
        key = fields.get("benchmark", str), fields.get("problem_id", str), fields.get("sample", int)
        has_failed = fields.raw.get("failure") is not None
        rewards[key] = None if has_failed else fields.get("reward", float)
    if not rewards:
        raise DataError(f"{printable(file)}: no verdict in it; evaluate the training set first")
    found: dict[str, tuple[int, int]] = {}
    for (_, problem_id, _), reward in rewards.items():
        if reward is not None:
            correct, counted = found.get(problem_id, (0, 0))
            found[problem_id] = correct + (reward >= success_threshold), counted + 1
    return found


def _verdicts(file: Path) -> Iterator[Fields]:
    """Of every response; the first line says what was evaluated, others begin a session."""
    for number, line in numbered_lines(file):
        if not line.endswith(b"\n"):
            return  # cut short by a crash
        place = f"{printable(file)}:{number}"
        record: dict[str, Any] = Fields(parse_json(line, place, half_pairs=True), place).raw
        if "problem_id" in record:
            yield Fields(record, place)
