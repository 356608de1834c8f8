"""Metrics as plotly figures: one curve per metric and run.

The colours have a contrast of at least 3 to white and to near-black, for light and dark schemes. No two curves differ
by colour alone: outcomes are blue and orange, and solid, dashed or dotted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gtpo_megatron.companions.report.run_data import RunData

PALETTE = ("#3f83d6", "#d06a1e", "#2b9a6b", "#a862c4", "#a9801d", "#d2506f", "#2f93a8", "#7d8590", "#8a6d5a")
BLUE, ORANGE, VIOLET, GREY = 0, 1, 3, 7
"""Indices into the palette; correct is blue, incorrect orange, both together grey."""
ALARM = "#d93a2f"
"""Colour of limits."""

SIGNIFICANT_DIGITS = 6
MIN_STEPS_TO_SMOOTH = 20
MIN_STEPS_TO_FOLD = 5
"""Fewer equal values say nothing about the next one."""
SAME = 1e-6
"""Relative difference below which values are the same to a reader; ratios of equal policies round by less."""
FEW_STEPS = 10
"""Number of steps up to which an axis has a tick for each."""
MAX_MARKED_POINTS = 12
"""Number of points up to which a curve has markers."""
MAX_POINTS, MAX_POINTS_OF_ALL_RUNS = 400, 2000
"""Limit per curve, and for one metric's curves of all runs; a figure is about 500 pixels wide."""

_DASH_WORDS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of a figure.

    Attributes:
        metric: name of the metric.
        label: label of the curve.
        color: index into the palette if one run is drawn; with several, each run has a colour.
        dash: line style of the curve.
        is_smoothed: False for extremes and rare measurements.
        interval: metrics of the ends of its interval, if it has one.
    """

    metric: str
    label: str
    color: int = BLUE
    dash: str = "solid"
    is_smoothed: bool = True
    interval: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        key: unique on the page.
        title: title of the figure.
        unit: unit of the values.
        caption: explanation in a sentence or two.
        curves: the curves of each run.
        layout: plotly layout in addition to :func:`plain_figure`'s.
        traces: plotly traces; empty if no run has values. ``meta`` of a curve over steps is the index of its run.
        section: heading of the page under which it stands.
        folded: why it has nothing to say, in one line; empty if it has.
    """

    key: str
    title: str
    unit: str
    caption: str
    curves: tuple[Curve, ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    traces: tuple[Any, ...] = ()
    section: str = ""
    folded: str = ""


def draw_curves(runs: Sequence[RunData], figure: Figure) -> Figure:
    """Adds a figure's curves: measured values faint, smoothed ones strong."""
    traces: list[Any] = []
    words: dict[str, str] = {}
    widest = coarsest = 1
    for index, run in enumerate(runs):
        for curve in figure.curves:
            steps, values = run.series(curve.metric)
            if not steps:
                continue
            words[curve.label] = _DASH_WORDS[curve.dash]
            kept, bucket = thinned(values, max(20, min(MAX_POINTS, MAX_POINTS_OF_ALL_RUNS // len(runs))))
            smoothed, width = smooth(values) if curve.is_smoothed else (values, 1)
            widest, coarsest = max(widest, width), max(coarsest, bucket)
            look: dict[str, Any] = {"name": curve.label, "color": curve.color, "dash": curve.dash, "meta": index}
            if len(runs) > 1:  # a colour per run, and one entry in the legend, which switches all its curves
                is_first = not any(trace.legendgroup == run.name and trace.showlegend for trace in traces)
                look |= {"name": run.name, "color": index, "legendgroup": run.name, "showlegend": is_first}
                look |= {"hovertemplate": f"%{{y:.4~g}} {curve.label}"}
            if smoothed != values:
                faint = {
                    "dash": "solid",
                    "opacity": 0.28,
                    "showlegend": False,
                    "hoverinfo": "skip",
                    "hovertemplate": None,
                }
                points = [(steps[index], values[index]) for index in kept]
                traces.append(line(points, **look | faint))
                # a mean over more steps than a bucket loses no peaks; equal steps make one hover label
                kept = sorted({*range(0, len(steps), -(-bucket // 2)), len(steps) - 1})
            points = [(steps[index], smoothed[index]) for index in kept]
            traces.append(line(points, **look, **_error_bars(run, curve, points)))
    caption = [figure.caption]
    if len(runs) > 1 and len(words) > 1:
        caption.append("; ".join(f"{dash}: {label}" for label, dash in words.items()).capitalize() + ".")
    if widest > 1:
        caption.append(f"Faint: as measured; strong: mean over {widest} steps.")
    if coarsest > 1:
        caption.append(f"Of every {coarsest} values only the least and the greatest are drawn.")
    return replace(figure, traces=tuple(traces), caption=" ".join(caption), folded=_nothing_to_say(runs, figure))


def _nothing_to_say(runs: Sequence[RunData], figure: Figure) -> str:
    """Why a figure needs no room: nothing was measured, or it is the same at every step of every run."""
    constants = []
    for curve in figure.curves:
        values = [run.values(curve.metric) for run in runs]
        measured = [own for own in values if own]
        if not measured:
            continue
        least, greatest = min(map(min, measured)), max(map(max, measured))
        is_short = max(map(len, measured)) < MIN_STEPS_TO_FOLD
        if is_short or greatest - least > SAME * max(abs(least), abs(greatest)):
            return ""
        constants.append(f"{curve.label} {greatest:.4g}")
    if not constants:
        return f"not measured: no step has {' or '.join(curve.metric for curve in figure.curves)}"
    return f"the same at every step: {', '.join(constants)}"


def line(points: Sequence[tuple[int, float]], *, name: str, color: int | str, dash: str = "solid", **look: Any) -> Any:
    """One plotly line, with its points marked if they are few.

    Args:
        points: steps and values.
        name: name in the legend.
        color: index into the palette, or a colour.
        dash: line style.
        look: further properties of ``plotly.graph_objects.Scatter``.
    """
    import plotly.graph_objects as go  # takes a second to import

    own = color if isinstance(color, str) else PALETTE[color % len(PALETTE)]
    basic = {"hovertemplate": "%{y:.4~g}", "line_width": 2.2, "line_dash": dash, "line_color": own, "marker_size": 6}
    steps, values = [step for step, _ in points], rounded([value for _, value in points])
    mode = "lines+markers" if len(points) <= MAX_MARKED_POINTS else "lines"
    return go.Scatter(**({"x": steps, "y": values, "name": name, "mode": mode} | basic | look))


def plain_figure(traces: Sequence[Any], **layout: Any) -> dict[str, Any]:
    """A plotly figure as plain values, with steps as x axis.

    Args:
        traces: plotly traces; those over steps have a legend, one alone too, whose name is nowhere else.
        layout: further properties of ``plotly.graph_objects.Layout``.
    """
    import plotly.graph_objects as go

    figure = go.Figure(
        traces,
        go.Layout(
            template="none",
            hovermode="x unified",
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"family": "inherit", "size": 12},
            margin={"l": 8, "r": 12, "t": 10, "b": 8},
            showlegend=any(trace.showlegend is not False for trace in traces),
            legend={"orientation": "h", "x": 0, "y": 1.03, "yanchor": "bottom", "traceorder": "normal"},
            xaxis={"title": {"text": "step", "standoff": 4}, "tickformat": ",d", "rangemode": "tozero"},
        ),
    )
    if max((step for trace in traces for step in trace.x), default=0) < FEW_STEPS:
        figure.update_xaxes(dtick=1)  # no ticks between steps
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,136,146,0.25)"}
    figure.update_layout(xaxis={**axis, "showgrid": False, "ticks": "outside", "ticklen": 4}, yaxis=axis)
    figure.update_layout(layout)
    plain: dict[str, Any] = figure.to_plotly_json()
    return plain


def thinned(values: Sequence[float], most: int) -> tuple[list[int], int]:
    """Indices of about ``most`` values: the first, the last, and the extremes of every bucket.

    Returns:
        The indices and the size of a bucket; 1 if all values are kept.
    """
    bucket = 1 if len(values) <= most else -(-len(values) * 2 // most)
    kept = {0, len(values) - 1}
    for start in range(0, len(values), bucket):
        part = range(start, min(start + bucket, len(values)))
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept), bucket


def smooth(values: list[float]) -> tuple[list[float], int]:
    """Centred running mean over a tenth of the series; the window shrinks at the ends instead of padding.

    The series is cut into blocks as wide as the window, so that a window is the end of one block and the beginning of
    the next, whose sums are running ones: the time does not depend on the width, nothing is subtracted, and what is not
    finite is in the windows that have it and no others.

    Returns:
        The smoothed values and the width of the window; width 1 if the series is too short to smooth.
    """
    if len(values) < MIN_STEPS_TO_SMOOTH:
        return values, 1
    half = len(values) // 20
    width, series = 2 * half + 1, np.asarray(values, dtype=np.float64)
    blocks = np.pad(series, (0, -len(series) % width)).reshape(-1, width)
    beginnings, ends = np.cumsum(blocks, axis=1).ravel(), np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    firsts = np.arange(len(series) - width + 1)
    sums = beginnings[firsts + width - 1] + np.where(firsts % width == 0, 0.0, ends[firsts])
    shrunk = np.arange(1, width, 2)  # the widths at the ends of the series
    left, right = (np.cumsum(side[: width - 1])[::2] / shrunk for side in (series, series[::-1]))
    return [*left.tolist(), *(sums / width).tolist(), *right[::-1].tolist()], width


def rounded(values: Sequence[float]) -> list[float]:
    """Rounds to the digits that a drawing can show."""
    return [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]


def _error_bars(run: RunData, curve: Curve, kept: Sequence[tuple[int, float]]) -> dict[str, Any]:
    low, high = (dict(zip(*run.series(metric), strict=True)) for metric in curve.interval or ("", ""))
    if not all(step in low and step in high for step, _ in kept):
        return {}
    above, below = [high[step] - value for step, value in kept], [value - low[step] for step, value in kept]
    return {"error_y": {"symmetric": False, "array": rounded(above), "arrayminus": rounded(below), "thickness": 1.4}}
