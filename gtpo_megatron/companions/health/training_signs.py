"""Signs in the numbers of the update: sampler beside trainer, skipped updates, gradients, experts."""

from gtpo_megatron.companions.health.finding import Finding, Level, level_above
from gtpo_megatron.companions.health.history import EDGE_STEPS, History
from gtpo_megatron.run_folder.metrics_file import finite

LIMIT_AMBER, LIMIT_RED = 0.5, 1.0
SKIPPED_RED = 3
NORM_AMBER, NORM_RED = 10.0, 100.0
DEAD_AMBER, DEAD_RED = 0.05, 0.3

_LIMIT = "_limit"


def mismatch(history: History) -> Finding | None:
    """Sampler's and trainer's log-probs against the limits at which the run stops."""
    shares = [
        (value / limit, name.removesuffix(_LIMIT).removeprefix("sync/"))
        for row in history.recent
        for name in row
        if name.startswith("sync/") and name.endswith(_LIMIT)
        if (limit := finite(row[name])) and (value := finite(row.get(name.removesuffix(_LIMIT)))) is not None
    ]
    if not shares:
        return None
    share, name = max(shares)
    return Finding(
        sign="sampler beside trainer",
        anchor="sampler-beside-trainer",
        level=level_above(share, LIMIT_AMBER, LIMIT_RED),
        seen=f"{name} at {share:.0%} of its limit",
        rule=f"last {EDGE_STEPS} steps, the figure closest to its limit: amber from {LIMIT_AMBER:.0%}, "
        f"red from {LIMIT_RED:.0%}, where the run stops",
    )


def skipped(history: History) -> Finding | None:
    """Updates that were left out, because their gradient was not finite."""
    total = history.total("optimizer/skipped_count")
    recent = history.total("optimizer/skipped_count", recent=True)
    if total is None or recent is None:
        return None
    level = Level.RED if recent >= SKIPPED_RED else Level.AMBER if total else Level.GREEN
    return Finding(
        sign="skipped updates",
        anchor="skipped-updates",
        level=level,
        seen=f"{total:.0f}, of them {recent:.0f} in the last {EDGE_STEPS} steps",
        rule=f"any: amber; {SKIPPED_RED} or more in the last {EDGE_STEPS} steps: red",
    )


def gradient_norm(history: History) -> Finding | None:
    """Spikes of the gradient's norm."""
    middle = history.middle("optimizer/grad_norm")
    recent = [row["optimizer/grad_norm"] for row in history.recent if "optimizer/grad_norm" in row]
    if middle is None or not recent:
        return None
    values = [value for norm in recent if (value := finite(norm)) is not None]
    ratio = max(values, default=0.0) / middle if middle else 0.0
    level = level_above(ratio, NORM_AMBER, NORM_RED)
    seen = f"at most {ratio:.1f} of the median {middle:.2g}"
    if len(values) < len(recent):
        level, seen = max(level, Level.AMBER), f"{seen}; {len(recent) - len(values)} not finite"
    return Finding(
        sign="gradient norm",
        anchor="gradient-norm",
        level=level,
        seen=seen,
        rule=f"largest of the last {EDGE_STEPS} steps over the median of all: amber from {NORM_AMBER:g} or if one is "
        f"not finite, red from {NORM_RED:g}",
    )


def experts(history: History) -> Finding | None:
    """Experts that get no token; of a mixture of experts only."""
    dead, load = history.last_mean("experts/dead_frac"), history.last_mean("experts/load_max_over_mean")
    if dead is None or load is None:
        return None
    return Finding(
        sign="experts",
        anchor="experts",
        level=level_above(dead, DEAD_AMBER, DEAD_RED),
        seen=f"{dead:.1%} without a token, the fullest at {load:.1f} of the mean",
        rule=f"share without a token in the last {EDGE_STEPS} steps: amber from {DEAD_AMBER:.0%}, "
        f"red from {DEAD_RED:.0%}",
    )
