"""How numbers become plotly traces, in plain values.

Colours are left to the page (``meta.color`` is an index into its palette), because it follows the reader's light or
dark scheme. One run shows its parts in different colours; several runs have a colour each, and line styles tell the
parts apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gtpo_megatron.observability.run_folder import RunData

Trace = dict[str, Any]

SIGNIFICANT_DIGITS = 6
MIN_STEPS_TO_SMOOTH = 20
MAX_BARS = 100
"""Steps that can stand side by side as bars; more are averaged."""
MAX_POINTS, MAX_POINTS_OF_ALL_RUNS = 400, 2000
"""Of a curve, and of one metric's curves of all runs together; a figure is some 500 pixels wide."""

_BACKGROUND: Trace = {"opacity": 0.28, "showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
_DASH_WORDS = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        key: unique on the page.
        title: what is drawn.
        unit: of the vertical axis.
        caption: how to read it, in a sentence or two.
        missing: what to say if there are no traces.
        traces: plotly traces.
        layout: plotly layout beside what the page sets.
        is_wide: takes the whole width of the page.
    """

    key: str
    title: str
    unit: str
    caption: str
    missing: str
    traces: tuple[Trace, ...] = ()
    layout: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of a figure.

    Attributes:
        metric: its name.
        label: what the reader calls it.
        color: its place in the palette where one run is drawn.
        dash: its line style where several runs are drawn, each in a colour of its own.
        is_smoothed: False for extremes, of which a mean says nothing.
    """

    metric: str
    label: str
    color: int = 0
    dash: str = "solid"
    is_smoothed: bool = True


def draw_curves(runs: Sequence[RunData], figure: Figure, curves: Sequence[Curve]) -> Figure:
    """Adds one curve a metric and run to ``figure``: faint as measured, strong where smoothing it makes sense."""
    traces: list[Trace] = []
    widest = coarsest = 1
    drawn: list[Curve] = []
    for run_index, run in enumerate(runs):
        in_legend = len(runs) > 1  # one entry a run, which switches all its curves
        for curve in curves:
            steps, values = run.series(curve.metric)
            if not steps:
                continue
            smoothed, width = smooth(values) if curve.is_smoothed else (values, 1)
            bucket = bucket_size(len(values), num_runs=len(runs))
            widest, coarsest = max(widest, width), max(coarsest, bucket)
            if curve not in drawn:
                drawn.append(curve)
            if len(runs) == 1:
                look: dict[str, Any] = {"name": curve.label, "color": curve.color, "dash": "solid"}
                traces += _faint_and_strong(steps, values, smoothed, bucket=bucket, **look)
                continue
            look = {"name": run.name, "color": run_index, "dash": curve.dash}
            added = _faint_and_strong(steps, values, smoothed, bucket=bucket, **look)
            added[-1] |= {"showlegend": in_legend, "hovertemplate": f"%{{y:.4~g}} {curve.label}"}
            traces += [{**trace, "legendgroup": run.name} for trace in added]
            in_legend = False
    caption = [figure.caption]
    if len(runs) > 1 and len(drawn) > 1:
        caption.append("; ".join(f"{_DASH_WORDS[curve.dash]}: {curve.label}" for curve in drawn).capitalize() + ".")
    if widest > 1:
        caption.append(f"Faint: as measured; strong: mean over {widest} steps.")
    if coarsest > 1:
        caption.append(thinned_words(coarsest))
    return replace(figure, traces=tuple(traces), caption=" ".join(caption))


def line(steps: Sequence[int], values: Sequence[float], *, name: str, color: int, dash: str = "solid") -> Trace:
    """One line over steps; a single point is drawn as a marker."""
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "x": list(steps),
        "y": rounded(values),
        "name": name,
        "line": {"width": 2.2, "dash": dash},
        "meta": {"color": color},
        "hovertemplate": "%{y:.4~g}",
    }


def bars(x: Sequence[int | str], values: Sequence[float], *, name: str, color: int) -> Trace:
    """One layer of stacked bars, in seconds."""
    return {
        "type": "bar",
        "x": list(x),
        "y": rounded(values),
        "name": name,
        "meta": {"color": color},
        "hovertemplate": "%{y:.2f} s",
    }


def binned(
    rows: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], float],
    mean: Callable[[Sequence[dict[str, Any]], Callable[[dict[str, Any]], float]], float],
) -> tuple[list[int], list[float], int]:
    """At most ``MAX_BARS`` bars: the first step of each, the ``mean`` of ``value`` over its rows, and rows a bar."""
    per_bar = max(1, -(-len(rows) // MAX_BARS))
    parts = [rows[start : start + per_bar] for start in range(0, len(rows), per_bar)]
    return [part[0]["step"] for part in parts], [mean(part, value) for part in parts], per_bar


def bucket_size(num_values: int, *, num_runs: int) -> int:
    """Neighbouring values of which a curve shows two, so that it has ``MAX_POINTS`` at most; 1 where it shows all."""
    max_points = max(20, min(MAX_POINTS, MAX_POINTS_OF_ALL_RUNS // num_runs))
    return 1 if num_values <= max_points else -(-num_values * 2 // max_points)


def thinned(values: Sequence[float], bucket: int) -> list[int]:
    """Indices of the first value, the last, and the least and the greatest of every ``bucket`` values.

    No peak is lost, as it would be if every n-th value were taken.
    """
    if bucket == 1:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for start in range(0, len(values), bucket):
        part = range(start, min(start + bucket, len(values)))
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept)


def thinned_words(bucket: int) -> str:
    """What a caption says of it."""
    return f"Of every {bucket} values only the least and the greatest are drawn."


def smooth(values: Sequence[float]) -> tuple[list[float], int]:
    """Centred running mean over a tenth of the series; the window shrinks at the ends instead of padding.

    Returns:
        The smoothed values and the width of the window; width 1 where the series is too short to smooth.
    """
    if len(values) < MIN_STEPS_TO_SMOOTH:
        return list(values), 1
    half = len(values) // 20
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means, 2 * half + 1


def rounded(values: Sequence[float]) -> list[float]:
    """To the digits that a drawing can show; full precision is in ``metrics.jsonl``."""
    return [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]


def _faint_and_strong(
    steps: Sequence[int],
    values: Sequence[float],
    smoothed: Sequence[float],
    *,
    bucket: int,
    name: str,
    color: int,
    dash: str,
) -> list[Trace]:
    """One trace where smoothing changes nothing, else two."""
    kept = thinned(values, bucket)
    raw_steps, raw = [steps[index] for index in kept], [values[index] for index in kept]
    if list(smoothed) == list(values):
        return [line(raw_steps, raw, name=name, color=color, dash=dash)]
    # a mean over far more steps than a bucket has no peaks to lose, and equal steps of all curves make one hover label
    even = sorted({*range(0, len(steps), -(-bucket // 2)), len(steps) - 1})
    strong = line(
        [steps[index] for index in even], [smoothed[index] for index in even], name=name, color=color, dash=dash
    )
    return [{**line(raw_steps, raw, name=name, color=color), **_BACKGROUND}, strong]
