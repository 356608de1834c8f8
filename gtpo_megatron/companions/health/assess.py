"""Assesses a run by all its signs."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.companions.health import machine_signs, policy_signs, training_signs
from gtpo_megatron.companions.health.finding import Finding, Level
from gtpo_megatron.companions.health.history import History

_SIGNS = (
    policy_signs.entropy,
    policy_signs.length,
    policy_signs.equal_groups,
    policy_signs.divergence,
    policy_signs.held_out,
    training_signs.mismatch,
    training_signs.skipped,
    training_signs.gradient_norm,
    training_signs.experts,
    machine_signs.graders,
    machine_signs.waiting,
    machine_signs.engines,
)


def assess(rows: Sequence[Mapping[str, Any]], num_problems: Mapping[str, int] | None = None) -> tuple[Finding, ...]:
    """One finding for each sign that the run has measured, the worst first.

    Args:
        rows: of ``metrics.jsonl``, by ascending step; also of a run that is under way.
        num_problems: problems of each held-out set, by its label, as far as known.
    """
    history = History(rows)
    found = [sign(history) for sign in _SIGNS] + [machine_signs.contamination(history, num_problems or {})]
    return tuple(sorted((finding for finding in found if finding is not None), key=lambda finding: -finding.level))


def in_one_line(findings: Sequence[Finding]) -> str:
    """``healthy: all 11 signs are green``, or what is not green."""
    bad = [finding for finding in findings if finding.level > Level.GREEN]
    if not findings:
        return "not assessed yet: no step is finished"
    if not bad:
        return f"healthy: all {len(findings)} signs are green"
    listed = "; ".join(f"{finding.level.word}: {finding.sign} ({finding.seen})" for finding in bad)
    return f"{listed}; the other {len(findings) - len(bad)} signs are green"
