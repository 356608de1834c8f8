"""Figures of what was measured on held-out problems."""

from collections.abc import Sequence
from dataclasses import replace

from gtpo_megatron.config.evaluation import HELDOUT
from gtpo_megatron.observability.measured_sets import mean_metric, measured_sets
from gtpo_megatron.observability.report_traces import (
    Curve,
    Figure,
    Trace,
    bucket_size,
    draw_curves,
    line,
    rounded,
    thinned,
    thinned_words,
)
from gtpo_megatron.observability.run_folder import RunData

_ACCURACY = Figure(
    key=HELDOUT,
    title="Held-out accuracy",
    unit="mean@k",
    caption="Share of correct answers to problems that are never trained on, with 95% intervals over problems.",
    missing="No held-out set was measured.",
    layout={"yaxis": {"tickformat": ".0%"}, "xaxis": {"rangemode": "normal"}},  # room for the interval at step 0
)
_BEST_OF = Figure(
    key="best-of",
    title="Best of 32 and best of 16, held out",
    unit="mean reward",
    caption="Expected reward of the best of 32 and of the best of 16 responses to a held-out problem, drawn with "
    "replacement from those that were sampled.",
    missing="Best@32 and best@16 were not measured.",
    layout={"xaxis": {"rangemode": "normal"}},
)


def accuracies(runs: Sequence[RunData]) -> list[Figure]:
    """One figure a set that any run was measured on, the run's own held-out set first; an empty one where none was."""
    return [_accuracy(runs, label) for label in measured_sets(runs)] or [_ACCURACY]


def best_of(runs: Sequence[RunData]) -> list[Figure]:
    """The early paper's reward curves on held-out problems: one figure a set; an empty one where none was measured."""
    drawn = [_best_of(runs, label) for label in measured_sets(runs)]
    return [figure for figure in drawn if figure.traces] or [_BEST_OF]


def _best_of(runs: Sequence[RunData], label: str) -> Figure:
    figure = _BEST_OF
    if label != HELDOUT:
        figure = replace(figure, key=f"best-of-{label}", title=f"Best of 32 and best of 16 on {label}")
    return draw_curves(
        runs,
        figure,
        [
            Curve(f"eval/{label}_best_at_32", "best of 32", is_smoothed=False),
            Curve(f"eval/{label}_best_at_16", "best of 16", 1, "dot", is_smoothed=False),
        ],
    )


def _accuracy(runs: Sequence[RunData], label: str) -> Figure:
    samples = {value if isinstance(value := run.setting("evaluation.samples"), int) else None for run in runs}
    unit = f"mean@{next(iter(samples))}" if len(samples) == 1 and None not in samples else _ACCURACY.unit
    figure = replace(_ACCURACY, unit=unit)
    if label != HELDOUT:
        figure = replace(figure, key=f"accuracy-{label}", title=f"Accuracy on {label}")
    traces = []
    coarsest = 1
    for index, run in enumerate(runs):
        steps, values = run.series(mean_metric(label))
        if steps:
            bucket = bucket_size(len(values), num_runs=len(runs))
            coarsest, kept = max(coarsest, bucket), thinned(values, bucket)
            steps, values = [steps[place] for place in kept], [values[place] for place in kept]
            trace = line(steps, values, name=run.name if len(runs) > 1 else unit, color=index)
            trace |= {"mode": "lines+markers", "marker": {"size": 7}, "hovertemplate": "%{y:.1%}"}
            traces.append(trace | _intervals(run, label, steps, values))
    if coarsest > 1:
        figure = replace(figure, caption=f"{figure.caption} {thinned_words(coarsest)}")
    return replace(figure, traces=tuple(traces))


def _intervals(run: RunData, label: str, steps: Sequence[int], values: Sequence[float]) -> Trace:
    low = dict(zip(*run.series(f"eval/{label}_interval_low"), strict=True))
    high = dict(zip(*run.series(f"eval/{label}_interval_high"), strict=True))
    if not all(step in low and step in high for step in steps):
        return {}
    points = list(zip(steps, values, strict=True))
    return {
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": rounded([high[step] - value for step, value in points]),
            "arrayminus": rounded([value - low[step] for step, value in points]),
            "thickness": 1.4,
            "width": 4,
        }
    }
