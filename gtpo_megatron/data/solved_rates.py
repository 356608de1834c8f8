"""How often an evaluation's responses solved each problem, by its file of verdicts."""

from collections.abc import Iterator
from pathlib import Path

import torch

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.outcomes import is_correct
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import numbered_lines, printable, shown

VERDICTS_FILE = "verdicts.jsonl"
"""Name of that file in an evaluation's folder."""


def read_rates(path: Path, *, content_sha256: str, success_threshold: float) -> dict[str, tuple[int, int]]:
    """By the id of a problem: correct responses, and those with a verdict.

    Of a response that was graded again the later verdict counts.

    Args:
        path: folder of an evaluation, or its file of verdicts.
        content_sha256: digest of the rows that were evaluated; verdicts of other benchmarks in the file are left out.
        success_threshold: least reward of a correct response.

    Raises:
        ConfigError: there is no such file.
        DataError: it is none of verdicts, or none of these rows.
    """
    file = path / VERDICTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"data.pool.verdicts={printable(path)}: no {VERDICTS_FILE}; name the folder that gtpo-megatron evaluate "
            f"has written (--output)"
        )
    contents: dict[str, str] = {}
    rewards: dict[tuple[str, str, int], float | None] = {}
    for fields in _records(file):
        if fields.has("session"):
            benchmarks = fields.fields("session").fields("benchmarks")
            contents |= {label: benchmarks.fields(label).get("content_sha256", str) for label in benchmarks.raw}
        elif fields.has("problem_id"):
            key = fields.get("benchmark", str), fields.get("problem_id", str), fields.get("sample", int)
            has_failed = fields.raw.get("failure") is not None
            rewards[key] = None if has_failed else fields.get("reward", float)
    usable = {key: reward for key, reward in rewards.items() if contents.get(key[0]) == content_sha256}
    if not usable:
        raise DataError(
            f"{printable(file)} has no verdict on the rows of data.train_path (it has {len(rewards)} on "
            f"{', '.join(map(shown, contents)) or 'nothing'}); evaluate that very file"
        )
    graded = {key: reward for key, reward in usable.items() if reward is not None}
    if not graded:
        raise DataError(f"{printable(file)}: none of {len(usable)} responses has a verdict; evaluate again")
    # compared as training compares them, in float32
    correct = is_correct(torch.tensor(list(graded.values())), success_threshold=success_threshold).tolist()
    found: dict[str, tuple[int, int]] = {}
    for (_, problem_id, _), is_right in zip(graded, correct, strict=True):
        before = found.get(problem_id, (0, 0))
        found[problem_id] = before[0] + is_right, before[1] + 1
    return found


def _records(file: Path) -> Iterator[Fields]:
    """Every whole line."""
    for number, line in numbered_lines(file):
        if not line.endswith(b"\n"):
            return  # cut short by a crash
        place = f"{printable(file)}:{number}"
        yield Fields(parse_json(line, place, half_pairs=True), place)
