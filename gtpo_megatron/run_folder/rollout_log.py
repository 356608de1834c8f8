"""Sampled texts: ``rollouts/step_000012.jsonl``, one response per line, with entropies and credit of every token.

Whole groups are written, because entropies are compared within a group.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.branches import Branch, check_within
from gtpo_megatron.errors import DataError, ShapeError
from gtpo_megatron.run_folder.metrics_file import all_finite, finite
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import numbered_lines, printable, shown

ROLLOUT_FOLDER = "rollouts"
SIGNIFICANT_DIGITS = 6
"""Digits of the values per token in the file."""

_log = logging.getLogger(__name__)
_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl")
_PER_TOKEN = ("token_entropy", "shaped_rewards", "advantages")
_TYPES = {
    "group_id": int,
    "policy_version": int,
    "prompt": str,
    "response": str,
    "truncated": bool,
    "reward_failed": bool,
    "answer": str,
    "problem_id": str,
    "info": str,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRecord:
    """One response of the file.

    Attributes:
        group_id: label of its prompt group, unique in the run.
        policy_version: version of the weights that generated it.
        prompt: text.
        response: text.
        tokens: the response's tokens as strings, ``|o|`` of them.
        token_entropy: ``|o|`` values in nats, of the policy that generated the token; 0 on foreign tokens.
        shaped_rewards: ``|o|`` values.
        advantages: ``|o|`` values.
        foreign_spans: first and last-plus-one token of each range that the policy did not write.
        branches: where tokens do not follow those before them.
        reward: raw outcome reward.
        truncated: whether the length limit cut the response.
        reward_failed: whether the reward function gave no verdict.
        answer: the reference answer.
        problem_id: id of the problem in its data set; "" if it is not known.
        parts: parts of the reward by name.
        info: note of the reward function about the response, a JSON object; "" if there is none.
    """

    group_id: int
    policy_version: int
    prompt: str
    response: str
    tokens: Sequence[str]
    token_entropy: Sequence[float]
    shaped_rewards: Sequence[float]
    advantages: Sequence[float]
    reward: float
    truncated: bool
    reward_failed: bool = False
    answer: str = ""
    problem_id: str = ""
    foreign_spans: Sequence[Sequence[int]] = ()
    branches: Sequence[Branch] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    info: str = ""

    def __post_init__(self) -> None:
        for name in _PER_TOKEN:
            if len(getattr(self, name)) != len(self.tokens):
                raise DataError(
                    f"rollout record of group {self.group_id}: {name} has {len(getattr(self, name))} values for "
                    f"{len(self.tokens)} tokens; give one a token, without padding"
                )
        check_within(self.branches, len(self.tokens))
        ends = [0, *(end for span in self.foreign_spans for end in span), len(self.tokens)]
        if any(len(span) != 2 for span in self.foreign_spans) or ends != sorted(ends):
            raise DataError(
                f"rollout record of group {self.group_id}: foreign_spans {list(self.foreign_spans)!r} of "
                f"{len(self.tokens)} tokens; expected pairs (first, last plus one) in ascending order"
            )

    @property
    def foreign_tokens(self) -> list[int]:
        """Indices of the tokens that the policy did not write."""
        return [index for first, last in self.foreign_spans for index in range(first, last)]


class RolloutLog:
    """Writes the sampled groups of a step.

    A step's file is replaced atomically. If the disk fails, the log is switched off with an error and training
    continues. Values that are not finite are written as null, with a warning at the first.

    Args:
        run_folder: the files go to ``rollouts/`` in it.
        groups_per_step: prompt groups per file; 0: no files.
        every_steps: steps between two files.

    Attributes:
        failure: why the log was switched off; None while it works.
    """

    def __init__(self, run_folder: Path, *, groups_per_step: int, every_steps: int = 1) -> None:
        self._folder = run_folder / ROLLOUT_FOLDER
        self._groups_per_step = groups_per_step
        self._every_steps = every_steps
        self._has_warned = False
        self.failure: str | None = None

    def choose(self, step: int, *, group_ids: Sequence[int], rewards: Sequence[float]) -> list[int]:
        """Chooses the groups to write at this step, first those with different rewards.

        Args:
            step: number of the step.
            group_ids: ``[B]``, one per response.
            rewards: ``[B]`` raw outcome rewards.

        Returns:
            At most ``groups_per_step`` group ids, in the order of their first response; empty if nothing is due.
        """
        if step % self._every_steps or not self._groups_per_step or self.failure is not None:
            return []
        by_group: dict[int, list[float]] = {}
        for group_id, reward in zip(group_ids, rewards, strict=True):
            by_group.setdefault(int(group_id), []).append(float(reward))
        order = list(by_group)
        ranked = sorted(order, key=lambda group_id: min(by_group[group_id]) == max(by_group[group_id]))
        chosen = set(ranked[: self._groups_per_step])
        return [group_id for group_id in order if group_id in chosen]

    def write(self, step: int, records: Iterable[RolloutRecord]) -> None:
        """Writes the file of one step."""
        rows = [_plain(record) for record in records]
        if not self._has_warned and any(_has_gaps(row) for row in rows):
            self._has_warned = True
            _log.warning(
                "step %d: numbers of sampled texts are not finite and written as null, and a report leaves them out; "
                "later ones are not announced",
                step,
            )
        lines = [json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        path = self._folder / f"step_{step:06d}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, "".join(lines), errors="backslashreplace")  # surrogates as JSON escapes
        except OSError as error:
            self.failure = str(error)
            _log.error("sampled texts are no longer written, training goes on: %s", error)

    def truncate_after(self, step: int) -> int:
        """Removes the files of steps after ``step``; returns their number."""
        later = [path for number, path in rollout_files(self._folder.parent) if number > step]
        for path in later:
            path.unlink()
        return len(later)


def foreign_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """The ranges of a mask that are False, as (first, last plus one)."""
    spans, first = [], 0
    for is_own, stretch in groupby(loss_mask):
        last = first + sum(1 for _ in stretch)
        if not is_own:
            spans.append((first, last))
        first = last
    return spans


def rollout_files(run_folder: Path) -> list[tuple[int, Path]]:
    """The steps of a run that have sampled texts, with their files, in ascending order."""
    folder = run_folder / ROLLOUT_FOLDER
    found = []
    for path in folder.iterdir() if folder.is_dir() else []:
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            found.append((int(match.group(1)), path))
    return sorted(found)


def iter_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Reads one step's file, response by response.

    Raises:
        DataError: a line is not a valid record, or the file cannot be read; the message has file and line.
    """
    for number, line in numbered_lines(path):
        try:
            record = _record(parse_json(line, "its line", half_pairs=True))
        except (ValueError, TypeError, ShapeError) as error:
            raise DataError(f"{printable(path)}:{number}: not a rollout record ({error}); remove the file") from error
        yield record


def _record(row: Any) -> RolloutRecord:
    """Converts a line's JSON; unknown fields are ignored.

    Raises:
        DataError: a value of the wrong type.
        TypeError: a field is missing.
    """
    if not isinstance(row, dict):
        raise DataError(f"got {shown(row)}, expected an object")
    values = {one.name: row[one.name] for one in fields(RolloutRecord) if one.name in row}
    for name, value in values.items():
        if name in _TYPES and type(value) is not _TYPES[name]:
            raise DataError(f"{name} is {shown(value)}, expected {_TYPES[name].__name__}")
        if name in _PER_TOKEN and not all_finite(value):
            raise DataError(f"{name} is {shown(value)}, expected a list of finite numbers")
        if name == "tokens" and not (isinstance(value, list) and set(map(type, value)) <= {str}):
            raise DataError(f"tokens is {shown(value)}, expected a list of strings")
        if name in ("foreign_spans", "branches") and not _are_pairs(value):
            raise DataError(f"{name} is {shown(value)}, expected pairs of integers")
        if name == "parts" and not _are_parts(value):
            raise DataError(f"parts is {shown(value)}, expected an object of finite numbers")
        if name == "reward" and finite(value) is None:
            raise DataError(f"reward is {shown(value)}, expected a finite number")
    values["branches"] = tuple(Branch(*pair) for pair in values.get("branches", ()))
    return RolloutRecord(**values)


def _are_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(finite(part) is not None for part in value.values())


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and [type(end) for end in pair] == [int, int] for pair in value
    )


def _plain(record: RolloutRecord) -> dict[str, Any]:
    row = {one.name: getattr(record, one.name) for one in fields(record)}  # asdict would copy every number
    row["tokens"] = list(record.tokens)
    for name in _PER_TOKEN:
        row[name] = [_rounded(value) for value in row[name]]
    row["parts"] = {name: part for name, part in record.parts.items() if math.isfinite(part)}
    for name in ("parts", "info", "problem_id", "branches"):
        if not row[name]:
            del row[name]
    row["reward"] = float(record.reward) if math.isfinite(record.reward) else None
    return row


def _rounded(value: float) -> float | None:
    return float(f"{float(value):.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None


def _has_gaps(row: dict[str, Any]) -> bool:
    return row["reward"] is None or any(None in row[name] for name in _PER_TOKEN)
