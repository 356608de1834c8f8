"""All signs of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.companions.health import machine_signs, policy_signs, training_signs
from gtpo_megatron.companions.health.history import History
from gtpo_megatron.companions.health.verdict import Level, Verdict

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


def judge(rows: Sequence[Mapping[str, Any]], num_problems: Mapping[str, int] | None = None) -> tuple[Verdict, ...]:
    """One verdict for each sign that the run has measured, the worst first.

    Args:
        rows: of ``metrics.jsonl``, by ascending step; also of a run that is under way.
        num_problems: problems of each held-out set, by its label, as far as known.
    """
    history = History(rows)
    found = [sign(history) for sign in _SIGNS] + [machine_signs.contamination(history, num_problems or {})]
    return tuple(sorted((verdict for verdict in found if verdict is not None), key=lambda verdict: -verdict.level))


def in_one_line(verdicts: Sequence[Verdict]) -> str:
    """``healthy: all 11 signs are green``, or what is not green."""
    bad = [verdict for verdict in verdicts if verdict.level > Level.GREEN]
    if not verdicts:
        return "not judged yet: no step is finished"
    if not bad:
        return f"healthy: all {len(verdicts)} signs are green"
    listed = "; ".join(f"{verdict.level.word}: {verdict.sign} ({verdict.seen})" for verdict in bad)
    return f"{listed}; the other {len(verdicts) - len(bad)} signs are green"
