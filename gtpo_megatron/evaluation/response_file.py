"""Sampled and graded responses of one benchmark, a line each: what a broken evaluation goes on from.

The first line says what they are of (model, data, sampling, seed, grading); a file of something else is refused. A
response that is graded again is appended, and its later line counts; the earlier one goes when the file is closed or,
after a crash, opened.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import replaced_file
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields, as_record
from gtpo_megatron.untrusted.json_text import parse_json, read_json_lines
from gtpo_megatron.untrusted.text import numbered_lines, printable

logger = logging.getLogger(__name__)

RESPONSES = "responses"
"""Folder of these files in that of an evaluation."""

_BLOCK_BYTES = 1 << 16

Identity = Mapping[str, Any]
"""Everything that a response depends on, as JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedResponse:
    """One response.

    Attributes:
        problem_id: of its problem.
        sample: its number among the problem's responses, from 0.
        seed: it was sampled with.
        reward: of the reward function; 0 without a verdict.
        failure: why there is no verdict; None where there is one.
        is_truncated: the length limit cut it.
        num_tokens: its length.
        answer: the final answer in it, or None.
        response: its text; empty in what is read back.
    """

    problem_id: str
    sample: int
    seed: int
    reward: float
    failure: str | None
    is_truncated: bool
    num_tokens: int
    answer: str | None
    response: str


class ResponseFile:
    """The file of one benchmark, open for appending.

    Args:
        path: made if it does not exist.
        identity: of the responses to come.
        answer_in: finds the final answer in a response's text. Responses that are there without an answer are looked
            at again: the function may be new, or have been mended. None where there is no such function.

    Raises:
        ConfigError: the file holds responses of something else.
        DataError: it is damaged, elsewhere than in a last line that a crash cut short.
    """

    def __init__(self, path: Path, identity: Identity, answer_in: Callable[[str], str | None] | None = None) -> None:
        self.path = path
        self._answer_in = answer_in
        self._is_outdated = False  # lines are superseded, or lack an answer that is known
        self._identity = json.loads(json.dumps(identity))
        self.responses: dict[tuple[str, int], GradedResponse] = {}
        if path.exists():
            self._read()
        if self._is_outdated:
            self._renew()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")  # half a pair as a JSON escape
        if self._file.tell() == 0:
            self._write({"identity": self._identity})

    def append(self, response: GradedResponse) -> None:
        """Writes a line, which counts from now on if the response was there; the text is not kept in memory."""
        self._write(asdict(response))
        self._remember(replace(response, response=""))

    def close(self) -> None:
        """Makes sure that everything is on the disk, one line a response."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self._is_outdated:
                self._renew()

    def _remember(self, response: GradedResponse) -> None:
        key = response.problem_id, response.sample
        self._is_outdated |= key in self.responses
        self.responses[key] = response

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def _read(self) -> None:
        self._cut_last_line()
        header: Any = None
        for place, record in _records(self.path):
            if header is None:
                header = record
                _check_same(_identity_in(record, self.path), self._identity, self.path)
                continue
            try:
                found = as_record(GradedResponse, record, place)
            except DataError as error:
                raise DataError(f"{error}; choose another --output") from error
            response = replace(found, response="")
            if response.answer is None and self._answer_in is not None:
                response = replace(response, answer=self._answer_in(found.response))
                self._is_outdated |= response.answer is not None
            self._remember(response)

    def _renew(self) -> None:
        """Writes the file aside, of each response the line that counts, with its answer; then puts it in place.

        It is a service to other readers: where the disk has no room for a second copy, the file stays as it is.
        """
        last = {_key(record): number for number, (_, record) in enumerate(_records(self.path))}
        try:
            with replaced_file(self.path) as file:
                for number, (_, record) in enumerate(_records(self.path)):
                    key = _key(record)
                    if last[key] == number:
                        found = {} if key is None else {"answer": self.responses[key].answer}
                        file.write(_line(record | found).encode("utf-8", "backslashreplace"))
        except OSError as error:
            logger.warning(
                "%s keeps lines that no longer count, of each response the last one does: a copy without them cannot "
                "be written: %s",
                *(self.path, error),
            )
            return
        self._is_outdated = False

    def _cut_last_line(self) -> None:
        """A crash can leave half a line at the end; its response is sampled again."""
        with self.path.open("r+b") as file:
            size = whole = file.seek(0, os.SEEK_END)
            while whole:
                start = max(0, whole - _BLOCK_BYTES)
                file.seek(start)
                newline = file.read(whole - start).rfind(b"\n")
                whole = start + newline + 1 if newline >= 0 else start
                if newline >= 0:
                    break
            if whole < size:
                logger.warning("%s: the last line is cut short and is dropped", self.path)
                file.truncate(whole)


def contents_of(folder: Path, identity: Identity) -> dict[str, str]:
    """Which benchmarks an evaluation's folder has responses of, whichever are wanted now.

    Args:
        folder: of the evaluation; it may be new.
        identity: what responses to any benchmark of this evaluation depend on, so without ``content``.

    Returns:
        The hash of each benchmark's content, by label.

    Raises:
        ConfigError: some are of another model, seed, template or sampling distribution.
        DataError: a file there is none of ours.
    """
    found: dict[str, str] = {}
    for path in sorted((folder / RESPONSES).glob("*.jsonl")):
        _, first = next(numbered_lines(path), (1, b""))
        if not first.endswith(b"\n"):  # a crash cut it short, or came before it: there is no response either
            continue
        header = _identity_in(parse_json(first, f"{printable(path)}:1"), path)
        content = str(header.get("content"))
        _check_same(header, {**identity, "content": content}, path)
        found[path.stem] = content
    return found


def _identity_in(header: Any, path: Path) -> dict[str, Any]:
    found = header.get("identity") if isinstance(header, dict) else None
    if not isinstance(found, dict):
        raise DataError(f"{path}:1: is no header of an evaluation; choose another --output")
    return found


def _check_same(found: Identity, wanted: Identity, path: Path) -> None:
    differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    if differing:
        changes = "; ".join(f"{key}: {found.get(key)!r} -> {wanted.get(key)!r}" for key in differing)
        raise ConfigError(
            f"{path.parent.parent} holds another evaluation of {path.stem}: {changes}; choose another "
            "--output, or remove it"
        )


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _key(record: Mapping[str, Any]) -> tuple[str, int] | None:
    """Of a response; None for the header."""
    return None if "identity" in record else (record["problem_id"], record["sample"])


def read_responses(path: Path) -> Iterator[GradedResponse]:
    """Every response of a file, with its text; while it is open, a response that was graded again has both its lines.

    Raises:
        DataError: the file is damaged.
    """
    for place, record in _records(path):
        if "identity" not in record:
            yield as_record(GradedResponse, record, place)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for place, record in read_json_lines(path, half_pairs=True):
            yield place, Fields(record, place).raw
    except DataError as error:
        raise DataError(f"{error}; choose another --output") from error
