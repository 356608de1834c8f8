"""``evaluation.json``: what was measured, and everything needed to measure it again."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.benchmark_run import Benchmark, Timing
from gtpo_megatron.evaluation.earlier_results import FILE, FORMAT, Entry, finished_figures, has_more
from gtpo_megatron.evaluation.metrics import CONFIDENCE, Interval
from gtpo_megatron.evaluation.overall import as_json, mean_over_benchmarks
from gtpo_megatron.evaluation.scores import ProblemResponses, Scores, mean_so_far, score

WRITE_EVERY_S = 10.0
"""Between two partial results; what is lost in between is in the response files."""

UNCHANGED = ("samples", "num_problems", "num_complete", "success_threshold")
"""Of an entry; where they are what they were, its figures are too."""


@dataclass(slots=True, kw_only=True)
class ResultFile:
    """Writes the results, whole or so far; a reader always finds a complete file.

    Attributes:
        folder: of the evaluation.
        config: of the evaluation.
        facts: what else determines or explains the results: model, versions, commit, machine.
        benchmarks: that are measured.
        has_answers: whether the answers of responses are known, for maj@k.
        earlier: what the folder's file had, by label, as ``read_earlier`` has it. Benchmarks that are not measured
            now stay in the file; the figures of those that are stay under ``earlier`` until there are new ones of all
            problems.
        timing: filled by the run.
        mean: over the benchmarks in the file, once the final results are written.
    """

    folder: Path
    config: EvaluateConfig
    facts: Mapping[str, Any]
    benchmarks: Sequence[Benchmark]
    has_answers: bool
    earlier: Mapping[str, Entry] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    mean: dict[str, Any] | None = None
    _next_write: float = field(default=0.0)

    @property
    def kept(self) -> dict[str, Entry]:
        """Of the earlier entries those of benchmarks that are not measured now."""
        measured = {benchmark.label for benchmark in self.benchmarks}
        return {label: entry for label, entry in self.earlier.items() if label not in measured}

    def write_partial(self) -> None:
        """What there is so far, at most every few seconds; of the figures mean@k only, which is cheap."""
        if time.monotonic() < self._next_write:
            return
        self._write(self._entries({}), None)
        self._next_write = time.monotonic() + WRITE_EVERY_S

    def write_final(self) -> dict[str, Scores]:
        """Every figure of every benchmark that has a complete problem.

        Raises:
            ConfigError: the folder cannot be written.
        """
        start = time.perf_counter()
        scores = {
            benchmark.label: score(
                complete,
                ks=self.config.resolved_ks,
                threshold=self.config.success_threshold,
                seed=self.config.seed,
                has_answers=self.has_answers,
            )
            for benchmark in self.benchmarks
            if (complete := benchmark.complete(self.config.samples))
        }
        entries = self._entries(scores)
        self.mean = mean_over_benchmarks(
            entries, measured=[benchmark.label for benchmark in self.benchmarks], config=self.config
        )
        self.timing.scoring_s += time.perf_counter() - start
        self._write(entries, self.mean)
        return scores

    def _entries(self, scores: Mapping[str, Scores]) -> dict[str, Entry]:
        return self.kept | {b.label: self._entry(b, scores.get(b.label)) for b in self.benchmarks}

    def _write(self, entries: Mapping[str, Entry], mean: dict[str, Any] | None) -> None:
        content = {
            "format": FORMAT,
            "complete": all(entry["num_complete"] == entry["num_problems"] for entry in entries.values()),
            "confidence": CONFIDENCE,
            **self.facts,
            "config": to_plain(self.config),
            "benchmarks": entries,
            "mean_over_benchmarks": mean,
            "timing": asdict(self.timing) | {"generation_frac": _generation_frac(self.timing)},
        }
        path = self.folder / FILE
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        try:
            write_file(path, text, errors="backslashreplace")  # half a pair as an escape
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --output") from error

    def _entry(self, benchmark: Benchmark, scores: Scores | None) -> Entry:
        problems = benchmark.problems
        found = benchmark.contamination
        complete = benchmark.complete(self.config.samples)
        entry: Entry = {
            "dataset": {
                "name": str(problems.dataset),
                "origin": problems.origin,
                "content_sha256": problems.content_sha256,
                "num_rows": problems.num_rows,
                "num_repeated": problems.num_repeated,
                "num_dropped_long": problems.num_dropped_long,
            },
            "responses": str(benchmark.file.path.relative_to(self.folder)),
            "num_problems": len(problems.problems),
            "num_complete": len(complete),
            "samples": self.config.samples,
            "success_threshold": self.config.success_threshold,
            "contamination": None
            if found is None
            else {
                "against": self.config.against,
                "num_exact": found.num_exact,
                "num_exact_only": found.num_exact_only,
                "matches": [asdict(m) for m in found.matches],
            },
        }
        earlier = finished_figures(self.earlier.get(benchmark.label))
        if scores is None and earlier is not None and all(earlier[name] == entry[name] for name in UNCHANGED):
            return earlier
        is_whole = scores is not None and len(complete) == len(problems.problems)
        if earlier is not None and (not is_whole or has_more(earlier, entry)):
            entry["earlier"] = earlier
        return entry | (self._so_far(complete) if scores is None else _figures(scores))

    def _so_far(self, complete: Sequence[ProblemResponses]) -> Entry:
        if not complete:
            return {}
        mean = mean_so_far(complete, threshold=self.config.success_threshold, seed=self.config.seed)
        return {"mean_at_k": as_json(mean)}


def _figures(scores: Scores) -> Entry:
    return {
        "mean_at_k": as_json(scores.mean_at_k),
        "mean_reward": as_json(scores.mean_reward),
        "pass_at_k": _by_k(scores.pass_at_k),
        "best_at_k": _by_k(scores.best_at_k),
        "maj_at_k": None if scores.maj_at_k is None else _by_k(scores.maj_at_k),
        "truncated_frac": scores.truncated_frac,
        "failed_count": scores.num_failed,
        "response_tokens_mean": scores.response_tokens_mean,
        "problems": scores.per_problem,
    }


def _generation_frac(timing: Timing) -> float | None:
    total = timing.generation_s + timing.grading_s + timing.other_s + timing.scoring_s
    return timing.generation_s / total if total else None


def _by_k(values: Mapping[int, Interval]) -> dict[str, dict[str, float]]:
    return {str(k): as_json(interval) for k, interval in values.items()}
