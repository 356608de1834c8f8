"""The table of a study: every arm with an interval over seeds and a comparison with the baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gtpo_megatron.companions.report.token_classes import CAPTION, KINDS
from gtpo_megatron.companions.study.comparison import (
    MAX_EXACT_PAIRS,
    NUM_RANDOM_SIGNS,
    PairedComparison,
    compare,
    holm,
    shown_p,
)
from gtpo_megatron.companions.study.plan import PlannedComparison, Study
from gtpo_megatron.companions.study.run_summary import SIDES, FinishedRun, of_arm, outcomes
from gtpo_megatron.evaluation.intervals import Interval, bootstrap_interval


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
    baseline = outcomes(study, summaries, study.baseline)
    rows = [row for name in arms if (row := _row(study, summaries, name, baseline)) is not None]
    compared = [row for row in rows if row.comparison is not None and row.comparison.num_pairs > 1]
    corrected = holm([row.comparison.p_t for row in compared if row.comparison is not None])
    by_name = dict(zip([row.name for row in compared], corrected, strict=True))
    return [replace(row, p_holm=by_name.get(row.name)) for row in rows]


def _row(study: Study, summaries: Sequence[FinishedRun], name: str, baseline: dict[int, float]) -> ArmRow | None:
    after = outcomes(study, summaries, name)
    if not after:
        return None
    runs = of_arm(summaries, name)
    before = [value for run in runs.values() if (value := run.at_start(study.outcome)) is not None]
    seeds = sorted(after.keys() & baseline.keys())
    comparison = None
    if name != study.baseline and seeds:
        comparison = compare([after[seed] for seed in seeds], [baseline[seed] for seed in seeds])
    costs = sorted({part for run in runs.values() for part in run.cost})
    return ArmRow(
        name=name,
        label=study.arm(name).label,
        num_seeds=len(after),
        before=fmean(before) if before else None,
        outcome=bootstrap_interval([after[seed] for seed in sorted(after)]),  # whose limits depend on the order
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
        difference, interval = difference_cells(found)
        pairs = "" if found.num_pairs == row.num_seeds else f" ({found.num_pairs} pairs)"
        shown += [
            difference + pairs,
            interval,
            shown_p(found.p_t) if found.has_scatter else "-",
            "-" if row.p_holm is None or not found.has_scatter else shown_p(row.p_holm),
            "-" if found.num_pairs < 2 else shown_p(found.p_sign_flip),
            "-" if math.isinf(found.smallest_detectable) else f"{100 * found.smallest_detectable:.1f}",
        ]
    return [*shown, f"{row.cost.get('responses', 0.0):,.0f}", f"{row.cost.get('training_s', 0.0) / 60:.1f}"]


def legend(study: Study) -> str:
    """Sentences that explain the table."""
    return (
        f"Outcome: {study.outcome} {study.outcome_time}, in percent; after it the 95% bootstrap interval over seeds, "
        f"which is too narrow for few seeds. Difference: to {study.arm(study.baseline).label} with the same seeds, in "
        "points, with its 95% t interval. p: paired t test; the same after Holm's correction for all arms of the "
        f"table; sign-flip test, up to {MAX_EXACT_PAIRS} pairs exact with 2/2^pairs as its least value, beyond with "
        f"{NUM_RANDOM_SIGNS:,} random signs. Detectable: the true difference in points that the t test would have "
        "found with a probability of 80%, given how much the pairs scatter: a smaller one says nothing either way. "
        "Responses: sampled in training, of one run; minutes: of training and evaluation, of one run."
    )


def choices_note(study: Study, rows: Sequence[ArmRow]) -> str:
    """The best arm of each group of alternatives; empty if there are none, or before all of a group have runs."""
    by_name = {row.name: row for row in rows}
    groups = [group for group in study.alternatives if set(group) <= by_name.keys()]
    best = [max((by_name[name] for name in group), key=lambda row: row.outcome.mean) for group in groups]
    shown = "; ".join(f"{row.label} ({row.name}): {100 * row.outcome.mean:.2f}" for row in best)
    return f"Best of its alternatives, by the mean over seeds, ties to the first: {shown}." if shown else ""


def commits_note(summaries: Sequence[FinishedRun]) -> str:
    """The runs of each commit; empty if all have one."""
    runs: dict[str, list[str]] = {}
    for summary in summaries:
        runs.setdefault(summary.commit, []).append(summary.name)
    if len(runs) < 2:
        return ""
    parts = [f"{commit}: {', '.join(names)}" for commit, names in sorted(runs.items(), key=lambda item: -len(item[1]))]
    return f"The runs are of {len(runs)} states of the code. {'; '.join(parts)}."


def missing_note(study: Study, summaries: Sequence[FinishedRun]) -> str:
    """What the tables lack; or empty.

    Runs without an outcome, planned comparisons without a pair, and seeds that not all arms have, so that a difference
    is of fewer pairs.
    """
    arms = [arm.name for arm in study.arms if of_arm(summaries, arm.name)]
    seeds = {name: outcomes(study, summaries, name).keys() for name in arms}
    parts = []
    without = [run.name for run in summaries if run.seed not in seeds[run.arm]]
    if without:
        parts.append(f"Left out, since {study.outcome} was not measured {study.outcome_time}: {', '.join(without)}.")
    if not seeds.get(study.baseline):
        parts.append(f"No run of {study.arm(study.baseline).label} has an outcome, so there are no differences to it.")
    none: set[int] = set()
    unpaired = [
        _planned_label(study, pair)
        for pair in study.comparisons
        if not seeds.get(pair.method, none) & seeds.get(pair.baseline, none)
    ]
    if unpaired:
        parts.append(
            f"Planned comparisons without a common seed: {'; '.join(unpaired)}. In Holm's correction a secondary one "
            "of them counts with a p of 1."
        )
    every = set().union(*seeds.values())
    gaps = [
        f"{study.arm(name).label} lacks {', '.join(map(str, gap))}"
        for name in arms
        if (gap := sorted(every - seeds[name]))
    ]
    if gaps:
        parts.append(f"Seeds that not all arms have, whose pairs are missing: {'; '.join(gaps)}.")
    return " ".join(parts)


def markdown(study: Study, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]) -> str:
    """The planned comparisons, the table of the arms, their legends, and the runs' commits if they differ."""
    planned = [planned_cells(study, row) for row in planned_rows(study, summaries)]
    tables = [_table(PLANNED_HEADINGS, planned)] if planned else []
    tables.append(_table(HEADINGS, [cells(row) for row in rows]))
    parts = [*tables, *notes(study, rows, summaries)]
    if kinds := kinds_rows(rows, summaries):
        parts += [_table(kinds_headings(rows), kinds), kinds_legend()]
    return "\n\n".join(parts) + "\n"


def notes(study: Study, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]) -> list[str]:
    """Notes below the tables."""
    below = (choices_note(study, rows), missing_note(study, summaries), commits_note(summaries))
    parts = (planned_legend(study), legend(study), *below)
    return [part for part in parts if part]


def kinds_headings(rows: Sequence[ArmRow]) -> list[str]:
    """Headings over :func:`kinds_rows`."""
    return ["tokens", "share", "entropy, nats", *(f"{side}, {row.label}" for side in SIDES for row in rows)]


def kinds_rows(rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]) -> list[list[str]]:
    """Where the credit of each arm goes, a row a kind of token; empty if no run says."""
    by_arm = {row.name: list(of_arm(summaries, row.name).values()) for row in rows}
    runs = [run for arm in by_arm.values() for run in arm]

    absent: dict[str, float | None] = {"share": 0.0}  # a kind that a run has no token of

    def mean(of: Sequence[FinishedRun], kind: str, what: str, shape: str) -> str:
        values = (run.kinds.get(kind, absent).get(what) for run in of if run.kinds)
        found = [value for value in values if value is not None]
        return format(fmean(found), shape) if found else "-"

    return [
        [
            kind,
            mean(runs, kind, "share", ".1%"),
            mean(runs, kind, "entropy", ".3f"),
            *(mean(by_arm[row.name], kind, side, ".2f") for side in SIDES for row in rows),
        ]
        for kind in KINDS
        if any(kind in run.kinds for run in runs)
    ]


def kinds_legend() -> str:
    """Sentences that explain them."""
    return f"{CAPTION} Means over runs."


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


PLANNED_HEADINGS = (
    "planned comparison", "seeds", "difference", "95% (t)", "p (t)", "p (Holm)", "p (signs)", "detectable",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """One planned comparison over the seeds that both arms have.

    Attributes:
        planned: planned comparison of two arms.
        found: result of the comparison.
        p_holm: p of the t test: as it is for a primary comparison, corrected for all others otherwise.
    """

    planned: PlannedComparison
    found: PairedComparison
    p_holm: float


def planned_rows(study: Study, summaries: Sequence[FinishedRun]) -> list[PlannedRow]:
    """The planned comparisons that have a common seed; the others count in the correction, with a p of 1."""
    compared = []
    for pair in study.comparisons:
        left, right = (outcomes(study, summaries, arm) for arm in (pair.method, pair.baseline))
        seeds = sorted(left.keys() & right.keys())
        if seeds:
            compared.append((pair, compare([left[seed] for seed in seeds], [right[seed] for seed in seeds])))
    p_values = [found.p_t for pair, found in compared if not pair.is_primary]
    # of all that were planned, or a p would depend on which runs there are
    num_planned = sum(not pair.is_primary for pair in study.comparisons)
    corrected = iter(holm([*p_values, *[1.0] * (num_planned - len(p_values))]))
    return [
        PlannedRow(planned=pair, found=found, p_holm=found.p_t if pair.is_primary else next(corrected))
        for pair, found in compared
    ]


def planned_cells(study: Study, row: PlannedRow) -> list[str]:
    """The row as text under ``PLANNED_HEADINGS``."""
    return [
        _planned_label(study, row.planned),
        str(row.found.num_pairs),
        *difference_cells(row.found),
        shown_p(row.found.p_t) if row.found.has_scatter else "-",
        shown_p(row.p_holm) if row.found.has_scatter else "-",
        "-" if row.found.num_pairs < 2 else shown_p(row.found.p_sign_flip),
        "-" if math.isinf(row.found.smallest_detectable) else f"{100 * row.found.smallest_detectable:.1f}",
    ]


def _planned_label(study: Study, pair: PlannedComparison) -> str:
    kind = "primary" if pair.is_primary else "secondary"
    return f"{study.arm(pair.method).label} to {study.arm(pair.baseline).label} ({kind})"


def difference_cells(found: PairedComparison) -> list[str]:
    """The difference in points and its interval."""
    low, high = found.t_interval
    return [
        f"{100 * found.difference.mean:+z.1f}",
        "-" if math.isinf(low) else f"[{100 * low:+z.1f}, {100 * high:+z.1f}]",
    ]


def planned_legend(study: Study) -> str:
    """Sentences that explain the table; empty without planned comparisons."""
    if not study.comparisons:
        return ""
    return (
        "Planned comparisons: written down before the runs. The p of the primary one stands as it is; those of the "
        "secondary ones are corrected for each other (Holm)."
    )
