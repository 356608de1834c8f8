"""The headline numbers of a report: a row of cards per run."""

import math
from collections.abc import Callable, Sequence
from html import escape

from gtpo_megatron.companions.report.run_data import RunData, measured_sets
from gtpo_megatron.config.problems import HELDOUT
from gtpo_megatron.observability.measured_sets import BenchmarkMean, interval, mean_metric, percent
from gtpo_megatron.observability.timers import duration
from gtpo_megatron.run_folder.metrics_file import finite

EDGE_STEPS = 5
"""Steps averaged for the first and last reward: one step's reward is mostly noise."""

_ALGORITHMS = {"GRPOS": "GRPO-S", "DrGRPO": "Dr. GRPO"}
_UNMEASURED = ("-", "not measured")

_Card = tuple[str, str]
"""A number and its label."""


def summary(run: RunData) -> str:
    """One line of HTML, such as ``GTPO v6 · 40 of 40 steps``."""
    planned = run.setting("num_steps")
    steps = f"{run.num_steps_done} of {planned} steps" if planned else f"{run.num_steps_done} steps"
    if isinstance(planned, int) and run.num_steps_done < planned:
        steps += " (not finished)"
    kind = str(run.setting("algorithm.kind", "")).removesuffix("Config")
    parts = [_ALGORITHMS.get(kind, kind), run.setting("algorithm.formulation")]
    algorithm = " ".join(str(part) for part in parts if part)
    return escape(" · ".join([algorithm, steps] if algorithm else [steps]))


def headlines(runs: Sequence[RunData]) -> str:
    """The section as HTML; missing measurements are dashes."""
    return "".join(_cards(run, runs) for run in runs)


def _cards(run: RunData, runs: Sequence[RunData]) -> str:
    label, accuracy = _accuracy(run, runs)
    shown: dict[str, _Card]
    if run.is_warm_start:
        shown = {"Held-out loss": _heldout_loss(run), "Training time": _time(run)}
    else:
        shown = {label: accuracy, "Reward": _reward(run), "Log-prob gap": _gap(run), "Training time": _time(run)}
    cards = "".join(
        f"<div><h2>{escape(title)}</h2><p class='number'>{escape(number)}</p><p class='about'>{escape(about)}</p></div>"
        for title, (number, about) in shown.items()
    )
    name = f"<h3>{escape(run.name)} <small>{summary(run)}</small></h3>" if len(runs) > 1 else ""
    return f"{name}<section class='headlines'>{cards}</section>"


def _ends(values: Sequence[float], write: Callable[[float], str]) -> str:
    return " → ".join(write(value) for value in values[:: max(1, len(values) - 1)])


def _heldout_loss(run: RunData) -> _Card:
    values = run.values("sft/heldout_loss")
    return (_ends(values, "{:.4f}".format), "nats per token, first and last") if values else _UNMEASURED


def _accuracy(run: RunData, runs: Sequence[RunData]) -> tuple[str, _Card]:
    """Accuracy on the first set of all runs; if there is none, on this run's first set, which is named."""
    own = measured_sets([run])
    sets = [each for each in map(measured_sets, ([run] for run in runs)) if each]
    shared = next((label for label in measured_sets(runs) if all(label in each for each in sets)), None)
    label = shared or next(iter(own), HELDOUT)
    title = "Held-out accuracy" if label == HELDOUT else f"Accuracy on {label}"
    means = run.values(mean_metric(label))
    if not means:
        return title, _UNMEASURED
    samples = run.setting("evaluation.samples")
    about = f"mean@{samples if isinstance(samples, int) else 'k'}"
    if len(means) > 1:
        about += f", {100 * (means[-1] - means[0]):+.1f} points"
    about += _intervals(
        [interval(row, label) for row in run.metrics if finite(row.get(mean_metric(label))) is not None]
    )
    overall = [mean for row in run.metrics if (mean := BenchmarkMean.of(row, own)) is not None]
    if overall:
        num_benchmarks = sum(each != HELDOUT for each in own)
        about += f"; mean of {num_benchmarks} sets {_ends([each.mean for each in overall], percent)}"
        about += _intervals([each.interval for each in overall])
    return title, (_ends(means, percent), about)


def _intervals(intervals: Sequence[tuple[float, float]]) -> str:
    """Intervals of the first and last measurement, or of the only one; empty if an end is unknown."""
    if not all(math.isfinite(end) for ends in intervals for end in ends):
        return ""
    shown = [f"[{100 * low:.1f}, {100 * high:.1f}]" for low, high in intervals[:: max(1, len(intervals) - 1)]]
    return ("; 95% interval " if len(shown) == 1 else "; 95% intervals ") + " and ".join(shown)


def _reward(run: RunData) -> _Card:
    values = run.values("rollout/reward_mean")
    if not values:
        return _UNMEASURED
    edge = min(EDGE_STEPS, max(1, len(values) // 2))
    ends = [sum(end) / edge for end in (values[:edge], values[-edge:])]
    about = f"means of the first and the last {edge} steps" if edge > 1 else "of the first and of the last step"
    return _ends(ends[: len(values)], lambda value: f"{value:.3f}"), about


def _gap(run: RunData) -> _Card:
    gaps, bounds = run.values("sync/logprob_gap_p99"), run.values("sync/logprob_gap_bound")
    if not gaps:
        return _UNMEASURED
    of_limit = f"; bound {min(bounds):.1e}" if bounds else ""
    return f"{max(gaps):.1e}", f"nats at most at 99% of the tokens of a step{of_limit}"


def _time(run: RunData) -> _Card:
    total = sum(run.training_s)
    steps = sorted(run.values("timing/step_s"))
    if not steps:
        return (duration(total), "without a step") if total else _UNMEASURED
    about = f"with evaluation and checkpoints; the median step {steps[len(steps) // 2]:.1f} s"
    speeds = sorted(run.values("throughput/tokens_per_s"))
    return duration(total), about + (f", {speeds[len(speeds) // 2]:,.0f} tokens/s" if speeds else "")
