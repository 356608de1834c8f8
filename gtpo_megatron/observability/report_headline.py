"""The headline numbers of a report: one card each for a single run, one row a run for several."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from gtpo_megatron.config.evaluation import HELDOUT
from gtpo_megatron.observability.finite import finite
from gtpo_megatron.observability.measured_sets import benchmark_means, interval, mean_metric, measured_sets, set_name
from gtpo_megatron.observability.progress import duration
from gtpo_megatron.observability.run_folder import RunData

EDGE_STEPS = 5
"""Steps averaged for the first and last reward: one step's reward is mostly noise."""
_ARROW = " <span class='to'>→</span> "
_NOTHING = "<span class='none'>-</span>"


@dataclass(frozen=True, slots=True)
class _Headline:
    """One headline number: its label, the number as HTML, and what it is in a few words."""

    label: str
    value: Callable[[RunData], str]
    about: Callable[[RunData], str]


def summary(run: RunData) -> str:
    """Such as ``GTPO v6 · 40 of 40 steps``."""
    planned = run.setting("num_steps")
    parts = [_algorithm(run)]
    steps = f"{run.num_steps_done} of {planned} steps" if planned else f"{run.num_steps_done} steps"
    if isinstance(planned, int) and run.num_steps_done < planned:
        steps += " (not finished)"
    return escape(" · ".join([part for part in parts if part] + [steps]))


def _algorithm(run: RunData) -> str:
    kind = str(run.setting("algorithm.kind", "")).removesuffix("Config")
    kind = {"GRPOS": "GRPO-S", "DrGRPO": "Dr. GRPO"}.get(kind, kind)
    formulation = run.setting("algorithm.formulation")
    return f"{kind} {formulation}" if formulation else kind


def headlines(runs: Sequence[RunData]) -> str:
    """The section, as HTML; what a run did not measure is a dash."""
    shown = (_accuracy(runs), *_HEADLINES)
    if len(runs) == 1:
        cards = [
            f"<div><h2>{headline.label}</h2><p class='number'>{headline.value(runs[0])}</p>"
            f"<p class='about'>{headline.about(runs[0])}</p></div>"
            for headline in shown
        ]
        return f'<section class="headlines" aria-label="Headline numbers">{"".join(cards)}</section>'
    head = "".join(f"<th>{headline.label}</th>" for headline in shown)
    rows = "".join(
        f"<tr><th>{escape(run.name)}<small>{summary(run)}</small></th>"
        + "".join(f"<td>{h.value(run)}<small>{h.about(run)}</small></td>" for h in shown)
        + "</tr>"
        for run in runs
    )
    return f'<div class="scroll"><table><thead><tr><th>run</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _ends(values: Sequence[float], write: Callable[[float], str]) -> str:
    if not values:
        return _NOTHING
    return write(values[0]) if len(values) == 1 else write(values[0]) + _ARROW + write(values[-1])


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _accuracy(runs: Sequence[RunData]) -> _Headline:
    """Of the first set that all runs were measured on; where they share none, of each run's first, which is named."""
    sets = [measured_sets([run]) for run in runs]
    shared = [label for label in measured_sets(runs) if all(label in each for each in sets if each)]
    label = shared[0] if shared else None

    def first(run: RunData) -> str:
        return label or next(iter(measured_sets([run])), HELDOUT)

    def about(run: RunData) -> str:
        text = _accuracy_about(run, first(run))
        return text if shared or not run.values(mean_metric(first(run))) else f"{set_name(first(run))}: {text}"

    return _Headline(
        f"Accuracy on {label}" if label not in (None, HELDOUT) else "Held-out accuracy",
        lambda run: _ends(run.values(mean_metric(first(run))), _percent),
        about,
    )


def _accuracy_about(run: RunData, label: str) -> str:
    means = run.values(mean_metric(label))
    if not means:
        return "not measured"
    samples = run.setting("evaluation.samples")
    about = f"mean@{samples if isinstance(samples, int) else 'k'}"
    if len(means) > 1:
        about += f", {100 * (means[-1] - means[0]):+.1f} points"
    about += _intervals(
        [interval(row, label) for row in run.metrics if finite(row.get(mean_metric(label))) is not None]
    )
    num_benchmarks, overall = benchmark_means(run, measured_sets([run]))
    if overall:
        about += f"; mean of {num_benchmarks} sets {_ends([each.mean for each in overall], _percent)}"
        about += _intervals([each.interval for each in overall])
    return about


def _intervals(intervals: Sequence[tuple[float, float]]) -> str:
    """Of the first and the last measurement, or of the only one; nothing where an end is unknown."""
    if not all(math.isfinite(end) for ends in intervals for end in ends):
        return ""
    shown = [f"[{100 * low:.1f}, {100 * high:.1f}]" for low, high in intervals[:: max(1, len(intervals) - 1)]]
    return ("; 95% interval " if len(shown) == 1 else "; 95% intervals ") + " and ".join(shown)


def _reward_value(run: RunData) -> str:
    values = run.values("rollout/reward_mean")
    edge = min(EDGE_STEPS, max(1, len(values) // 2))
    ends = [values[:edge], values[-edge:]] if len(values) > 1 else [values]
    return _ends([sum(end) / len(end) for end in ends if end], lambda value: f"{value:.3f}")


def _reward_about(run: RunData) -> str:
    values = run.values("rollout/reward_mean")
    edge = min(EDGE_STEPS, max(1, len(values) // 2))
    return "not measured" if not values else f"mean of the first and last {edge} steps"


def _gap_value(run: RunData) -> str:
    gaps = run.values("sync/logprob_gap_max")
    return f"{max(gaps):.1e}" if gaps else _NOTHING


def _gap_about(run: RunData) -> str:
    if not run.values("sync/logprob_gap_max"):
        return "not measured"
    limit = run.setting("weight_sync.logprob_gap_limit")
    return "nats at most, over all steps" + (f"; limit {limit:g}" if isinstance(limit, float) else "")


def _time_value(run: RunData) -> str:
    total = sum(sum(run.values(f"timing/{part}_s")) for part in ("step", "evaluation", "checkpoint"))
    return duration(total) if total else _NOTHING


def _time_about(run: RunData) -> str:
    steps = sorted(run.values("timing/step_s"))
    if not steps:
        return "not measured"
    about = f"with evaluation and checkpoints; the median step {steps[len(steps) // 2]:.1f} s"
    speeds = sorted(run.values("throughput/tokens_per_s"))
    return about + (f", {speeds[len(speeds) // 2]:,.0f} tokens/s" if speeds else "")


def _memory_value(run: RunData) -> str:
    peaks = run.values("memory/peak_gib")
    return f"{max(peaks):.1f} GiB" if peaks else _NOTHING


def _memory_about(run: RunData) -> str:
    return "all processes of one machine" if run.values("memory/peak_gib") else "not measured"


_HEADLINES = (
    _Headline("Reward", _reward_value, _reward_about),
    _Headline("Log-prob gap", _gap_value, _gap_about),
    _Headline("Training time", _time_value, _time_about),
    _Headline("Peak memory", _memory_value, _memory_about),
)
