"""``verdicts.jsonl``, the append-only file from which every figure of an evaluation is computed.

The first line is the identity: all that responses depend on (model, sampling, seed, template, grading); another
identity is refused. Then follow, in order of time, sessions (benchmarks, settings, versions and commit, source of the
reward function) and graded responses. If a response was graded again, the later line is used. Lines after a session
with another source of the reward function are responses without a verdict.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gtpo_megatron.batch import REQUESTS_REFUSED
from gtpo_megatron.companions.evaluate.model_folder import FINGERPRINT_FORM
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields, as_kind, as_record
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import numbered_lines, printable

logger = logging.getLogger(__name__)

TEMPLATE_INPUTS = "template_inputs"
"""What the chat template was given besides the messages, in the identity."""
HEAD_DTYPE = "head_dtype"
"""What logits were computed in, in the identity."""
_IDENTITY, _SESSION, _BENCHMARKS, _SOURCE = "evaluation", "session", "benchmarks", "reward_source"
_UNSAID = {HEAD_DTYPE: "float32"}
"""Of identities that do not say it: evaluations of earlier versions had no other."""

VerdictKey = tuple[str, str, int]
"""Benchmark, problem and sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedResponse:
    """One response with its verdict.

    Attributes:
        benchmark: label of its benchmark.
        problem_id: id of its problem.
        sample: number of the response among the problem's, from 0.
        seed: the seed of its sampling.
        reference: the reference answer.
        reward: the reward function's result; 0 without a verdict.
        failure: reason why there is no verdict; None if there is one.
        is_truncated: whether the length limit cut it.
        num_tokens: length of the response in tokens.
        answer: the final answer in it, or None.
        response: text of the response; in memory only for responses that are graded again.
        parts: parts of the reward by name.
        info: the reward function's remarks on it, as a JSON object; in the file only.
    """

    benchmark: str
    problem_id: str
    sample: int
    seed: int
    reference: str
    reward: float
    failure: str | None
    is_truncated: bool
    num_tokens: int
    answer: str | None
    response: str
    parts: dict[str, float] = field(default_factory=dict)
    info: str = ""

    @property
    def key(self) -> VerdictKey:
        """Identifies the response."""
        return self.benchmark, self.problem_id, self.sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSet:
    """A benchmark of a session.

    Attributes:
        dataset: the requested data set.
        origin: the file, or the hub's repository, commit and split.
        content_sha256: digest of ids, prompts and answers.
        num_rows: rows read.
        num_repeated: rows dropped because an earlier one has the same prompt.
        num_dropped_long: problems dropped because their prompt is too long.
        problem_ids: ids of all usable problems, in order, before ``num_problems`` is applied.
        contamination: result of the search in the training set; None if there was no search.
    """

    dataset: str
    origin: str
    content_sha256: str
    num_rows: int
    num_repeated: int
    num_dropped_long: int
    problem_ids: tuple[str, ...]
    contamination: dict[str, Any] | None = None


class VerdictFile:
    """The file of one evaluation, read once and then open for appending.

    Args:
        path: created if it does not exist.
        identity: all that responses depend on, as JSON values.
        answer_in: function that finds the final answer in a response's text, for lines without an answer. None if there
            is no such function.
        reward_source: digest of the files of the reward function; "": it is this package's own.

    Attributes:
        sets: every benchmark in the file by label, of its last session.
        sessions: records of the sessions in order of time, as JSON values, without their benchmarks' problems.
        verdicts: the last verdict of every response.
        outdated: responses with their texts, whose last verdict is of another source of the reward function. Of
            sessions that do not say, as of earlier versions, verdicts are taken as they are.

    Raises:
        ConfigError: the file has another identity.
        DataError: it is damaged; a last line that a crash cut short is dropped instead.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        answer_in: Callable[[str], str | None] | None = None,
        *,
        reward_source: str = "",
    ) -> None:
        self.path = path
        self.sets: dict[str, MeasuredSet] = {}
        self.sessions: list[dict[str, Any]] = []
        self.verdicts: dict[VerdictKey, GradedResponse] = {}
        self.outdated: dict[VerdictKey, GradedResponse] = {}
        self._reward_source = reward_source
        self._is_outdated = False  # what follows the last session
        self._answer_in = answer_in
        identity = json.loads(json.dumps(identity))
        if path.exists():
            self._read(identity)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")  # surrogates as JSON escapes
        if self._file.tell() == 0:
            self._write({_IDENTITY: identity})

    def check_content(self, label: str, content_sha256: str) -> None:
        """Raises ConfigError if the file has another data set under this label."""
        if label in self.sets:
            found, wanted = self.sets[label].content_sha256, content_sha256
            self._check_same({"content": found}, {"content": wanted}, f" of {printable(label)}")

    def begin_session(self, facts: Mapping[str, Any], sets: Mapping[str, MeasuredSet]) -> None:
        """Appends a session: the settings of the following verdicts.

        Args:
            facts: settings, model, versions and commit, as JSON values.
            sets: the benchmarks measured, by label.
        """
        source = {_SOURCE: self._reward_source} if self._reward_source else {}
        session = {**facts, **source, _BENCHMARKS: {label: asdict(one) for label, one in sets.items()}}
        self._write({_SESSION: session})
        self._note_session(session, sets)

    def append(self, verdict: GradedResponse) -> None:
        """Appends a verdict, which replaces an earlier one of the response."""
        record = asdict(verdict)
        self._write({name: value for name, value in record.items() if value or name not in ("parts", "info")})
        self._remember(verdict)

    def has_verdict(self, key: VerdictKey) -> bool:
        """Whether the response is in the file, and this reward function's grading did not fail."""
        known = self.verdicts.get(key)
        return known is not None and known.failure is None

    def complete(self, label: str, problem_ids: Sequence[str], samples: int) -> list[list[GradedResponse]]:
        """The responses of the problems that have all their samples."""
        rows = ([self.verdicts.get((label, name, sample)) for sample in range(samples)] for name in problem_ids)
        return [[one for one in row if one is not None] for row in rows if None not in row]

    def close(self) -> None:
        """Flushes the file to disk and closes it."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _read(self, identity: Mapping[str, Any]) -> None:
        whole = 0
        try:
            for place, record, end in _records(self.path):
                if whole:
                    self._take(place, record)
                elif isinstance(found := record.get(_IDENTITY), dict):
                    self._check_same({**_UNSAID, **found}, {**_UNSAID, **identity})
                else:
                    raise DataError(f"{place}: is no header of an evaluation")
                whole = end
        except DataError as error:
            raise DataError(f"{error}; choose another --output") from error
        if whole < self.path.stat().st_size:  # after a crash
            logger.warning("%s: the last line is cut short and is dropped", self.path)
            os.truncate(self.path, whole)

    def _take(self, place: str, record: Mapping[str, Any]) -> None:
        if _SESSION in record:
            session = Fields(record[_SESSION], place).raw
            self._note_session(
                session, as_kind(session.get(_BENCHMARKS), dict[str, MeasuredSet], f"{place}: {_BENCHMARKS}")
            )
            return
        verdict = as_record(GradedResponse, record, place)
        if self._is_outdated:
            verdict = replace(verdict, answer=None)  # its function may stand in the same file
        if verdict.answer is None and self._answer_in is not None:
            verdict = replace(verdict, answer=self._answer_in(verdict.response))
        if self._is_outdated:
            self.verdicts.pop(verdict.key, None)
            self.outdated[verdict.key] = verdict
        else:
            self._remember(verdict)

    def _note_session(self, session: Mapping[str, Any], sets: Mapping[str, MeasuredSet]) -> None:
        self.sessions.append({**session, _BENCHMARKS: list(sets)})
        self.sets |= sets
        self._is_outdated = session.get(_SOURCE, self._reward_source) != self._reward_source

    def _remember(self, verdict: GradedResponse) -> None:
        self.outdated.pop(verdict.key, None)
        if verdict.failure is None:  # to save memory; why a request was refused is said at the end
            info = verdict.info if verdict.parts.get(REQUESTS_REFUSED) else ""
            verdict = replace(verdict, response="", info=info)
        self.verdicts[verdict.key] = verdict

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def _check_same(self, found: Mapping[str, Any], wanted: Mapping[str, Any], of: str = "") -> None:
        differing = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
        if differing:
            changes = "; ".join(f"{key}: {found.get(key)!r} -> {wanted.get(key)!r}" for key in differing)
            if "model" in differing and not str(found.get("model")).startswith(FINGERPRINT_FORM):
                changes += ", where the first is of an earlier version, which did not tell all models apart"
            raise ConfigError(
                f"{self.path.parent} holds another evaluation{of}: {changes}; choose another --output, or remove it"
            )


def recorded_date(path: Path) -> str:
    """The date in the prompts of the evaluation in a file; "" if there is none, or no such evaluation."""
    if not path.is_file():
        return ""
    try:
        _, first, _ = next(_records(path), ("", {}, 0))
        header = Fields(first, str(path)).fields(_IDENTITY)
        return header.fields(TEMPLATE_INPUTS).get("date", str, "")
    except DataError:  # which opening the file says
        return ""


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Place, content and end offset of every complete line."""
    end = 0
    for number, line in numbered_lines(path):
        if not line.endswith(b"\n"):
            return
        place, end = f"{printable(path)}:{number}", end + len(line)
        yield place, Fields(parse_json(line, place, half_pairs=True), place).raw, end
