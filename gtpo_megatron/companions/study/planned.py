"""The comparisons that a study planned before its runs, as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.companions.study.comparison import PairedComparison, compare, holm, shown_p
from gtpo_megatron.companions.study.plan import PlannedComparison, Study
from gtpo_megatron.companions.study.run_summary import FinishedRun, outcomes

PLANNED_HEADINGS = (
    "planned comparison", "seeds", "difference", "95% (t)", "p (t)", "p (Holm)", "p (signs)", "detectable",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """One planned comparison over the seeds that both arms have.

    Attributes:
        planned: which arms.
        found: the comparison.
        p_holm: p of the t test: as it is for a primary comparison, corrected for all others otherwise.
    """

    planned: PlannedComparison
    found: PairedComparison
    p_holm: float


def planned_rows(study: Study, summaries: Sequence[FinishedRun]) -> list[PlannedRow]:
    """The planned comparisons that have a common seed."""
    compared = []
    for pair in study.comparisons:
        left, right = (outcomes(summaries, arm, study.outcome) for arm in (pair.method, pair.baseline))
        seeds = sorted(left.keys() & right.keys())
        if seeds:
            compared.append((pair, compare([left[seed] for seed in seeds], [right[seed] for seed in seeds])))
    corrected = iter(holm([found.p_t for pair, found in compared if not pair.is_primary]))
    return [
        PlannedRow(planned=pair, found=found, p_holm=found.p_t if pair.is_primary else next(corrected))
        for pair, found in compared
    ]


def planned_cells(study: Study, row: PlannedRow) -> list[str]:
    """The row as text under ``PLANNED_HEADINGS``."""
    pair = row.planned
    kind = "primary" if pair.is_primary else "secondary"
    labels = f"{study.arm(pair.method).label} to {study.arm(pair.baseline).label} ({kind})"
    return [
        labels,
        str(row.found.num_pairs),
        *difference_cells(row.found),
        shown_p(row.found.p_t) if row.found.has_scatter else "-",
        shown_p(row.p_holm) if row.found.has_scatter else "-",
        "-" if row.found.num_pairs < 2 else shown_p(row.found.p_sign_flip),
        "-" if math.isinf(row.found.smallest_detectable) else f"{100 * row.found.smallest_detectable:.1f}",
    ]


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
