"""The figures of an evaluation, computed from its verdicts, and ``evaluation.json``, which nothing here reads."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.benchmark_run import Timing
from gtpo_megatron.evaluation.intervals import CONFIDENCE, Interval
from gtpo_megatron.evaluation.scores import Scores, mean_over, score
from gtpo_megatron.evaluation.verdict_file import MeasuredSet, VerdictFile

RESULTS_FILE = "evaluation.json"
FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    """What the verdicts say of one benchmark, by the settings of now.

    Attributes:
        label: of the benchmark.
        measured: the benchmark, as its last session found it.
        is_earlier: it was measured by an earlier command, and this one does not ask for it.
        num_problems: that the settings ask for.
        num_complete: problems whose responses are all there.
        scores: over complete problems. None if there are none, and for an earlier benchmark unless all are complete:
            a trial of two problems would weigh as much in the mean as a whole benchmark.
    """

    label: str
    measured: MeasuredSet
    is_earlier: bool
    num_problems: int
    num_complete: int
    scores: Scores | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """What the verdicts say of all benchmarks of a file.

    Attributes:
        benchmarks: in the order in which they were first measured.
        mean: of every figure over the benchmarks that have scores, each counting alike; empty if none has.
    """

    benchmarks: tuple[BenchmarkResult, ...]
    mean: dict[str, Interval]

    @property
    def num_averaged(self) -> int:
        """Benchmarks in the mean."""
        return sum(one.scores is not None for one in self.benchmarks)


def evaluation_result(
    file: VerdictFile, config: EvaluateConfig, *, asked_for: Collection[str], has_answers: bool
) -> EvaluationResult:
    """Computes every figure of every benchmark in the file: samples, problems, ks and threshold are those of now.

    Args:
        file: of the evaluation.
        config: of this command.
        asked_for: labels of its benchmarks; a label without verdicts counts as none of its problems complete.
        has_answers: whether the answers of responses are known, for maj@k.
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
        result: to write.
        path: of the file.
        facts: settings, model, versions, commit and machine of this command.
        samples: responses per problem.
        sessions: what the verdicts were measured with.
        timing: of this command.

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
