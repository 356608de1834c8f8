"""Computes the figures of an evaluation from its verdicts, and writes ``evaluation.json``."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.evaluate.benchmark_run import Timing
from gtpo_megatron.companions.evaluate.scores import Scores, mean_over, score
from gtpo_megatron.companions.evaluate.verdict_file import MeasuredSet, VerdictFile
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.intervals import CONFIDENCE, Interval

RESULTS_FILE = "evaluation.json"
FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    """The result of one benchmark with the current settings.

    Attributes:
        label: label of the benchmark.
        measured: the benchmark of its last session.
        is_earlier: whether an earlier command measured it, and this one does not.
        num_problems: number of problems by the current settings.
        num_complete: problems that have all their responses.
        scores: scores over complete problems; None if there are none, or if an earlier benchmark is incomplete.
    """

    label: str
    measured: MeasuredSet
    is_earlier: bool
    num_problems: int
    num_complete: int
    scores: Scores | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """The results of all benchmarks of a file.

    Attributes:
        benchmarks: results by benchmark, in the order in which they were first measured.
        mean: unweighted mean of every figure over the benchmarks that have scores; empty if none has.
    """

    benchmarks: tuple[BenchmarkResult, ...]
    mean: dict[str, Interval]

    @property
    def num_averaged(self) -> int:
        """Number of benchmarks in the mean."""
        return sum(one.scores is not None for one in self.benchmarks)


def evaluation_result(
    file: VerdictFile, config: EvaluateConfig, *, asked_for: Collection[str], has_answers: bool
) -> EvaluationResult:
    """Computes every figure of every benchmark in the file with the current settings.

    Args:
        file: the evaluation's file of verdicts.
        config: the current settings.
        asked_for: labels of the benchmarks of this command.
        has_answers: whether answers were extracted, for maj@k.
    """
    found = []
    for label, measured in file.sets.items():
        wanted = measured.problem_ids[: config.num_problems or None]
        rows = file.complete(label, wanted, config.samples)
        is_earlier = label not in asked_for
        scores = None
        if rows and not (is_earlier and len(rows) < len(wanted)):
            scores = score(
                rows,
                ks=config.resolved_ks,
                threshold=config.success_threshold,
                seed=config.seed,
                has_answers=has_answers,
            )
        found.append(
            BenchmarkResult(
                label=label,
                measured=measured,
                is_earlier=is_earlier,
                num_problems=len(wanted),
                num_complete=len(rows),
                scores=scores,
            )
        )
    tables = [one.scores.per_problem for one in found if one.scores is not None]
    return EvaluationResult(benchmarks=tuple(found), mean=mean_over(tables, seed=config.seed) if tables else {})


def write_results(
    result: EvaluationResult,
    path: Path,
    *,
    facts: Mapping[str, Any],
    samples: int,
    sessions: Sequence[Mapping[str, Any]],
    timing: Timing,
) -> None:
    """Writes ``evaluation.json``.

    Args:
        result: the result.
        path: the file.
        facts: settings, model, versions, commit and machine of this command.
        samples: responses per problem.
        sessions: settings of all sessions.
        timing: timing of this command.

    Raises:
        ConfigError: the folder cannot be written.
    """
    content = {
        "format": FORMAT,
        "complete": all(one.num_complete == one.num_problems for one in result.benchmarks if not one.is_earlier),
        "confidence": CONFIDENCE,
        **facts,
        "benchmarks": {one.label: _benchmark(one, samples) for one in result.benchmarks},
        "mean_over_benchmarks": {"num_benchmarks": result.num_averaged, "figures": _intervals(result.mean)},
        "timing": asdict(timing) | {"generation_frac": timing.generation_frac},
        "sessions": list(sessions),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        write_file(path, text, errors="backslashreplace")  # half a pair as an escape
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --output") from error


def _benchmark(one: BenchmarkResult, samples: int) -> dict[str, Any]:
    dataset = asdict(one.measured)
    del dataset["problem_ids"]
    entry: dict[str, Any] = {
        **dataset,
        "is_earlier": one.is_earlier,
        "num_problems": one.num_problems,
        "num_complete": one.num_complete,
        "samples": samples,
    }
    if one.scores is None:
        return entry
    values = one.scores.per_problem
    return entry | {
        "figures": _intervals(one.scores.intervals),
        "truncated_frac": one.scores.truncated_frac,
        "failed_count": one.scores.num_failed,
        "response_tokens_mean": one.scores.response_tokens_mean,
        "problems": [
            problem | {name: float(value[index]) for name, value in values.items()}
            for index, problem in enumerate(one.scores.problems)
        ],
    }


def _intervals(figures: Mapping[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: asdict(interval) for name, interval in figures.items()}
