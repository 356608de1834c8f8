"""``evaluation.json``: what was measured, and everything needed to measure it again."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.benchmark_run import Benchmark, Timing
from gtpo_megatron.evaluation.metrics import CONFIDENCE, Interval
from gtpo_megatron.evaluation.scores import Scores, score

FILE = "evaluation.json"
FORMAT = 1
WRITE_EVERY_S = 10.0
"""Between two partial results; what is lost in between is in the response files."""


@dataclass(slots=True, kw_only=True)
class ResultFile:
    """Writes the results, whole or so far; a reader always finds a complete file.

    Attributes:
        folder: of the evaluation.
        config: of the evaluation.
        facts: what else determines or explains the results: model, versions, commit, machine.
        benchmarks: that are measured.
        has_answers: whether the answers of responses are known, for maj@k.
        timing: filled by the run.
    """

    folder: Path
    config: EvaluateConfig
    facts: Mapping[str, Any]
    benchmarks: Sequence[Benchmark]
    has_answers: bool
    timing: Timing = field(default_factory=Timing)
    _next_write: float = field(default=0.0)

    def write_partial(self) -> None:
        """What there is so far, at most every few seconds; cheap figures only."""
        now = time.monotonic()
        if now < self._next_write:
            return
        self.write({})
        self._next_write = time.monotonic() + WRITE_EVERY_S

    def write_final(self) -> dict[str, Scores]:
        """Every figure of every benchmark that has a complete problem."""
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
        self.timing.scoring_s += time.perf_counter() - start
        self.write(scores)
        return scores

    def write(self, scores: Mapping[str, Scores]) -> None:
        """Replaces the file.

        Raises:
            ConfigError: the folder cannot be written.
        """
        benchmarks = {b.label: self._benchmark(b, scores.get(b.label)) for b in self.benchmarks}
        content = {
            "format": FORMAT,
            "complete": all(entry["num_complete"] == entry["num_problems"] for entry in benchmarks.values()),
            "confidence": CONFIDENCE,
            **self.facts,
            "config": to_plain(self.config),
            "benchmarks": benchmarks,
            "mean_over_benchmarks": _mean(list(scores.values())),
            "timing": asdict(self.timing) | {"generation_frac": _generation_frac(self.timing)},
        }
        path = self.folder / FILE
        scratch = path.with_name(path.name + ".tmp")
        try:
            with scratch.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --output") from error

    def _benchmark(self, benchmark: Benchmark, scores: Scores | None) -> dict[str, Any]:
        problems = benchmark.problems
        found = benchmark.contamination
        entry: dict[str, Any] = {
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
            "num_complete": len(benchmark.complete(self.config.samples)),
            "samples": self.config.samples,
            "contamination": None
            if found is None
            else {
                "against": self.config.against,
                "num_exact": found.num_exact,
                "matches": [asdict(m) for m in found.matches],
            },
        }
        if scores is None:
            return entry
        return entry | {
            "mean_at_k": _interval(scores.mean_at_k),
            "accuracy": _interval(scores.accuracy),
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


def _interval(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _by_k(values: Mapping[int, Interval]) -> dict[str, dict[str, float]]:
    return {str(k): _interval(interval) for k, interval in values.items()}


def _mean(scores: Sequence[Scores]) -> dict[str, Any] | None:
    """Each benchmark counts alike, whatever its size."""
    if not scores:
        return None

    def mean(intervals: Sequence[Interval]) -> float:
        return sum(interval.mean for interval in intervals) / len(intervals)

    majorities = [s.maj_at_k for s in scores if s.maj_at_k is not None]
    return {
        "num_benchmarks": len(scores),
        "mean_at_k": mean([s.mean_at_k for s in scores]),
        "accuracy": mean([s.accuracy for s in scores]),
        "pass_at_k": {str(k): mean([s.pass_at_k[k] for s in scores]) for k in scores[0].pass_at_k},
        "best_at_k": {str(k): mean([s.best_at_k[k] for s in scores]) for k in scores[0].best_at_k},
        "maj_at_k": {str(k): mean([m[k] for m in majorities]) for k in majorities[0]} if majorities else None,
    }
