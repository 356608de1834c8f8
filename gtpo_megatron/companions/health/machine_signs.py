"""Signs in what surrounds the policy: graders, data, engines, and time spent waiting."""

from collections.abc import Mapping
from statistics import median

from gtpo_megatron.companions.health.finding import Finding, Level, level_above
from gtpo_megatron.companions.health.history import EDGE_STEPS, History
from gtpo_megatron.observability.measured_sets import set_name
from gtpo_megatron.run_folder.metrics_file import finite

FAILED_AMBER, FAILED_RED = 0.01, 0.1
CONTAMINATED_RED = 0.1
WAIT_AMBER, WAIT_RED = 0.3, 0.6
RESTARTS_RED = 5

_CONTAMINATED = "_contaminated_count"


def graders(history: History) -> Finding | None:
    """Responses without a verdict, which take no part in the update."""
    failed = history.total("rollout/reward_failed_count", recent=True)
    responses = history.total("rollout/responses_count", recent=True)
    if failed is None or not responses:
        return None
    return Finding(
        sign="graders",
        anchor="graders",
        level=level_above(failed / responses, FAILED_AMBER, FAILED_RED),
        seen=f"{failed:.0f} of {responses:.0f} responses without a verdict",
        rule=f"last {EDGE_STEPS} steps: amber from {FAILED_AMBER:.0%}, red from {FAILED_RED:.0%}",
    )


def contamination(history: History, num_problems: Mapping[str, int]) -> Finding | None:
    """Held-out problems that are trained on too.

    Args:
        history: of the run.
        num_problems: problems of each held-out set, by its label, as far as known.
    """
    counts = {
        name.removeprefix("eval/").removesuffix(_CONTAMINATED): count
        for row in history.rows
        for name in row
        if name.startswith("eval/") and name.endswith(_CONTAMINATED)
        if (count := finite(row[name])) is not None
    }
    if not counts:
        return None
    found = {label: count for label, count in counts.items() if count}
    is_many = any(count >= CONTAMINATED_RED * num_problems.get(label, float("inf")) for label, count in found.items())
    texts = []
    for label, count in found.items():
        of = f" of {num_problems[label]}" if label in num_problems else ""
        texts.append(f"{count:.0f}{of} in {set_name(label)}")
    return Finding(
        sign="contamination",
        anchor="contamination",
        level=Level.RED if is_many else Level.AMBER if found else Level.GREEN,
        seen=", ".join(texts) or "none found",
        rule=f"a held-out problem that is trained on: amber; {CONTAMINATED_RED:.0%} of a set: red",
    )


def waiting(history: History) -> Finding | None:
    """Time in which the trainer waits for responses, where sampling runs beside it."""
    shares = [
        wait / step
        for row in history.recent
        if (wait := finite(row.get("timing/rollout_wait_s"))) is not None and (step := finite(row.get("timing/step_s")))
    ]
    if not shares:
        return None
    share = median(shares)
    return Finding(
        sign="waiting for responses",
        anchor="waiting-for-responses",
        level=level_above(share, WAIT_AMBER, WAIT_RED),
        seen=f"{share:.0%} of a step",
        rule=f"median of the last {EDGE_STEPS} steps: amber from {WAIT_AMBER:.0%}, red from {WAIT_RED:.0%}",
    )


def engines(history: History) -> Finding | None:
    """Engines that died and were replaced."""
    restarts = history.values("health/engine_restarts_count")
    if not restarts:
        return None
    most = max(restarts)
    return Finding(
        sign="engines",
        anchor="engines",
        level=Level.RED if most >= RESTARTS_RED else Level.AMBER if most else Level.GREEN,
        seen=f"{most:.0f} replaced since a start",
        rule=f"any: amber; {RESTARTS_RED} or more: red",
    )
