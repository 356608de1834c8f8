"""The table of a study: every arm with an interval over seeds and a comparison with the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gtpo_megatron.evaluation.intervals import Interval, bootstrap_interval
from gtpo_megatron.study.comparison import PairedComparison, compare, holm
from gtpo_megatron.study.plan import Study
from gtpo_megatron.study.run_summary import FinishedRun, of_arm


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRow:
    """One arm of the table.

    Attributes:
        name: name of the arm.
        label: label of the arm.
        num_seeds: number of finished runs.
        before: mean outcome before training; None if not measured.
        outcome: mean over seeds with its bootstrap interval; the interval is empty for a single seed.
        comparison: comparison with the baseline over common seeds; None for the baseline, or without common seeds.
        p_holm: p of the t test, corrected for the number of arms.
        cost: costs of a run, means over seeds.
    """

    name: str
    label: str
    num_seeds: int
    before: float | None
    outcome: Interval
    comparison: PairedComparison | None
    p_holm: float | None
    cost: dict[str, float]


def arm_rows(study: Study, summaries: Sequence[FinishedRun], arms: Sequence[str]) -> list[ArmRow]:
    """One row for each of the arms that has a finished run with an outcome."""
    baseline = _outcomes(study, summaries, study.baseline)
    rows = [row for name in arms if (row := _row(study, summaries, name, baseline)) is not None]
    compared = [row for row in rows if row.comparison is not None and row.comparison.num_pairs > 1]
    corrected = holm([row.comparison.p_t for row in compared if row.comparison is not None])
    by_name = dict(zip([row.name for row in compared], corrected, strict=True))
    return [replace(row, p_holm=by_name.get(row.name)) for row in rows]


def _outcomes(study: Study, summaries: Sequence[FinishedRun], arm: str) -> dict[int, float]:
    found = {seed: summary.last(study.outcome) for seed, summary in of_arm(summaries, arm).items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _row(study: Study, summaries: Sequence[FinishedRun], name: str, baseline: dict[int, float]) -> ArmRow | None:
    outcomes = _outcomes(study, summaries, name)
    if not outcomes:
        return None
    runs = of_arm(summaries, name)
    before = [value for run in runs.values() if (value := run.first(study.outcome)) is not None]
    seeds = sorted(outcomes.keys() & baseline.keys())
    comparison = None
    if name != study.baseline and seeds:
        comparison = compare([outcomes[seed] for seed in seeds], [baseline[seed] for seed in seeds])
    costs = sorted({part for run in runs.values() for part in run.cost})
    return ArmRow(
        name=name,
        label=study.arm(name).label,
        num_seeds=len(outcomes),
        before=fmean(before) if before else None,
        outcome=bootstrap_interval(list(outcomes.values())),
        comparison=comparison,
        p_holm=None,
        cost={part: fmean([run.cost.get(part, 0.0) for run in runs.values()]) for part in costs},
    )


HEADINGS = (
    "arm", "seeds", "before", "after", "difference", "95% (t)", "p (t)", "p (Holm)", "p (signs)", "detectable",
    "responses", "minutes",
)  # fmt: skip


def cells(row: ArmRow) -> list[str]:
    """The row as text under ``HEADINGS``; accuracies in percent, differences in points."""
    found = row.comparison
    spread = f" [{100 * row.outcome.low:.1f}, {100 * row.outcome.high:.1f}]" if row.num_seeds > 1 else ""
    shown = [
        row.label,
        str(row.num_seeds),
        "-" if row.before is None else f"{100 * row.before:.1f}",
        f"{100 * row.outcome.mean:.1f}{spread}",
    ]
    if found is None:
        shown += ["-"] * 6
    else:
        low, high = found.t_interval
        shown += [
            f"{100 * found.difference.mean:+.1f}",
            "-" if math.isinf(low) else f"[{100 * low:+.1f}, {100 * high:+.1f}]",
            "-" if found.num_pairs < 2 else f"{found.p_t:.3f}",
            "-" if row.p_holm is None else f"{row.p_holm:.3f}",
            "-" if found.num_pairs < 2 else f"{found.p_sign_flip:.3f}",
            "-" if math.isinf(found.smallest_detectable) else f"{100 * found.smallest_detectable:.1f}",
        ]
    return [*shown, f"{row.cost.get('responses', 0.0):,.0f}", f"{row.cost.get('training_s', 0.0) / 60:.1f}"]


def legend(study: Study) -> str:
    """Sentences that explain the table."""
    return (
        f"Outcome: {study.outcome} at the last step, in percent; after it the 95% bootstrap interval over seeds, which "
        f"is too narrow for few seeds. Difference: to {study.arm(study.baseline).label} with the same seeds, in "
        "points, with its 95% t interval. p: paired t test; the same after Holm's correction for all arms of the "
        "table; exact sign-flip test, whose least value is 2/2^seeds. Detectable: the true difference in points that "
        "the t test would have found with a probability of 80%, given how much the pairs scatter: a smaller one says "
        "nothing either way. Responses: sampled in training, of one run; minutes: of training and evaluation, of one "
        "run."
    )


def commits_note(summaries: Sequence[FinishedRun]) -> str:
    """The runs of each commit; empty if all have one."""
    runs: dict[str, list[str]] = {}
    for summary in summaries:
        runs.setdefault(summary.commit, []).append(summary.name)
    if len(runs) < 2:
        return ""
    parts = [f"{commit}: {', '.join(names)}" for commit, names in sorted(runs.items(), key=lambda item: -len(item[1]))]
    return f"The runs are of {len(runs)} states of the code. {'; '.join(parts)}."


def markdown(study: Study, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]) -> str:
    """The table, its legend, and the runs' commits if they differ."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    below = [part for part in (legend(study), commits_note(summaries)) if part]
    return "\n".join(lines) + "\n\n" + "\n\n".join(below) + "\n"
