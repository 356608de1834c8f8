"""Axes of a page's curves besides the step: time and tokens, as running sums over the steps."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.companions.report.traces import rounded
from gtpo_megatron.run_folder.metrics_file import finite

MAX_KNOTS = 2000
"""Steps of all runs whose sums are on the page; the page's script interpolates between them."""

STEP, TIME, SAMPLED, TRAINED = "step", "time", "sampled", "trained"
LABELS = {STEP: "step", TIME: "time", SAMPLED: "sampled tokens", TRAINED: "trained tokens"}
_COUNTS = {SAMPLED: "rollout/response_tokens_count", TRAINED: "rollout/trained_tokens_count"}


def axes(runs: Sequence[RunData]) -> dict[str, Any]:
    """Plain values for the page's script.

    Returns:
        ``names``: the axes that every run has, with their labels; ``runs``: one mapping per run, of some of its
        ``steps`` and the running sum of each axis after them.
    """
    sums = [_sums(run) for run in runs]
    names = [name for name in LABELS if name == STEP or all(name in own for own in sums)]
    tables = []
    for run, own in zip(runs, sums, strict=True):
        every = max(1, -(-len(run.metrics) * len(runs) // MAX_KNOTS))
        kept = sorted({*range(0, len(run.metrics), every), len(run.metrics) - 1} - {-1})
        steps = [run.metrics[index]["step"] for index in kept]
        columns = {name: rounded([own[name][index] for index in kept]) for name in names if name != STEP}
        tables.append({"steps": steps, **columns})
    return {"names": {name: LABELS[name] for name in names}, "runs": tables}


def axis_switch(found: dict[str, Any]) -> str:
    """The choice of the axis as HTML; empty if there is only the step."""
    if len(found["names"]) < 2:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == STEP else ""}>'
        f"<span>{label}</span></label>"
        for name, label in found["names"].items()
    )
    about = (
        "Time: of steps, evaluations and checkpoints, without the start. Tokens: of responses, those that dynamic "
        "sampling dropped counted as sampled, not as trained."
    )
    return (
        f'<div class="switch axis"><span class="name">Curves over</span>'
        f'<div class="choices" role="radiogroup" aria-label="Draw curves over">{choices}</div>'
        f'<p class="about">{about}</p></div>'
    )


def _sums(run: RunData) -> dict[str, list[float]]:
    """The running sums that the metrics of a run allow."""
    found = {}
    if any(run.training_s):
        found[TIME] = list(accumulate(run.training_s))
    for name, metric in _COUNTS.items():
        if run.values(metric):
            found[name] = list(accumulate(finite(row.get(metric)) or 0.0 for row in run.metrics))
    return found
