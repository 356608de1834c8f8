"""The forest plot of a study, and its metrics over a dose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gtpo_megatron.companions.report.traces import BLUE, GREY, ORANGE, VIOLET, line, plain_figure, rounded
from gtpo_megatron.companions.study.comparison import compare, t_interval
from gtpo_megatron.companions.study.plan import Study
from gtpo_megatron.companions.study.run_summary import FinishedRun, of_arm, outcomes

LAST_FRACTION = 0.25
"""Entropy and sign flips of a run are means over this share of its steps, the last ones."""
_FAINT = 0.45
_GAP = 0.06
"""Width between panels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForestRow:
    """One comparison, in points of the outcome.

    Attributes:
        label: names of the two arms.
        is_planned: it was written down before the runs.
        mean: mean difference over seeds.
        interval: 95% t interval; infinite for one seed.
        by_seed: the difference of each seed.
    """

    label: str
    is_planned: bool
    mean: float
    interval: tuple[float, float]
    by_seed: dict[int, float]


def forest_rows(study: Study, summaries: Sequence[FinishedRun], arms: Sequence[str]) -> list[ForestRow]:
    """The planned comparisons, then every other arm with the baseline; those without a common seed are left out."""
    planned = [(pair.method, pair.baseline) for pair in study.comparisons]
    others = [(arm, study.baseline) for arm in arms if arm != study.baseline and (arm, study.baseline) not in planned]
    rows = []
    for method, baseline in [*planned, *others]:
        left, right = outcomes(study, summaries, method), outcomes(study, summaries, baseline)
        seeds = sorted(left.keys() & right.keys())
        if not seeds:
            continue
        found = compare([left[seed] for seed in seeds], [right[seed] for seed in seeds])
        rows.append(
            ForestRow(
                label=f"{study.arm(method).label} − {study.arm(baseline).label}",  # noqa: RUF001 - a minus sign
                is_planned=(method, baseline) in planned,
                mean=100 * found.difference.mean,
                interval=(100 * found.t_interval[0], 100 * found.t_interval[1]),
                by_seed={seed: 100 * (left[seed] - right[seed]) for seed in seeds},
            )
        )
    return rows


def forest_figure(rows: Sequence[ForestRow]) -> dict[str, Any]:
    """A plotly figure: a diamond and an interval a row, and a dot a seed below them; the first row is on top."""
    traces = []
    for index, row in enumerate(rows):
        height = len(rows) - 1 - index
        color = BLUE if row.is_planned else GREY
        seeds = [f"seed {seed}: {value:+.1f}" for seed, value in row.by_seed.items()]
        traces.append(
            _points(
                [(value, height - 0.25) for value in row.by_seed.values()],
                color=color,
                marker_opacity=_FAINT,
                hovertext=seeds,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
        low, high = row.interval
        reach = {} if math.isinf(low) else {
            "error_x": {"symmetric": False, "array": rounded([high - row.mean]),
                        "arrayminus": rounded([row.mean - low]), "thickness": 2}
        }  # fmt: skip
        words = f"{row.mean:+.1f}" + (f" [{low:+.1f}, {high:+.1f}]" if reach else "")
        traces.append(
            _points(
                [(row.mean, height)],
                color=color,
                marker_symbol="diamond",
                marker_size=10,
                hovertext=[f"{row.label}: {words}"],
                hovertemplate="%{hovertext}<extra></extra>",
                **reach,
            )
        )
    zero = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1}}
    labels = {"tickvals": list(range(len(rows)))[::-1], "ticktext": [row.label for row in rows], "showgrid": False}
    return plain_figure(
        traces,
        hovermode="closest",
        showlegend=False,
        shapes=[zero],
        xaxis={"title": {"text": "points"}, "tickformat": "+", "dtick": None, "rangemode": "normal", "showgrid": True},
        yaxis={**labels, "range": [-0.6, len(rows) - 0.4]},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DosePoint:
    """A metric at one dose.

    Attributes:
        dose: the number in which the arms differ.
        mean: mean over seeds.
        interval: 95% t interval; infinite for one seed.
        by_seed: the value of each seed.
    """

    dose: float
    mean: float
    interval: tuple[float, float]
    by_seed: dict[int, float]


def dose_points(study: Study, summaries: Sequence[FinishedRun], metric: str) -> list[DosePoint]:
    """A metric over the study's dose: the outcome as the table has it, others as their mean over the last steps.

    Args:
        study: the plan, with a dose.
        summaries: finished runs.
        metric: name of a curve.
    """
    points = []
    for arm, dose in study.dose:
        if metric == study.outcome:
            values = outcomes(study, summaries, arm)
        else:
            runs = of_arm(summaries, arm)
            values = {seed: late for seed, run in runs.items() if (late := _late_mean(run, metric)) is not None}
        if values:
            interval = t_interval(list(values.values()))
            points.append(DosePoint(dose=dose, mean=fmean(values.values()), interval=interval, by_seed=values))
    return points


def _late_mean(run: FinishedRun, metric: str) -> float | None:
    first = run.num_steps * (1 - LAST_FRACTION)
    late = [value for step, value in run.curves.get(metric, ()) if step > first]
    return fmean(late) if late else None


_PANELS: tuple[tuple[str, str, tuple[tuple[str, str, int, str], ...]], ...] = (
    ("held-out accuracy", ".0%", (("", "held-out accuracy", BLUE, "solid"),)),
    ("entropy, nats a token", "", (("policy/entropy_nats", "entropy", VIOLET, "solid"),)),
    (
        "sign flips, share of tokens",
        ".0%",
        (
            ("credit/correct_tokens_negative_frac", "correct, below zero", BLUE, "dash"),
            ("credit/incorrect_tokens_positive_frac", "incorrect, above zero", ORANGE, "dot"),
        ),
    ),
)
"""Title, format of the axis, and curves: metric (empty: the study's outcome), label, colour, dash."""


def dose_figure(study: Study, summaries: Sequence[FinishedRun]) -> dict[str, Any]:
    """A plotly figure of three panels over the dose: outcome, entropy, sign flips; without a trace if nothing is known.

    The doses are spaced equally, since one of them may be 0.
    """
    doses = [dose for _, dose in study.dose]
    width = (1 - _GAP * (len(_PANELS) - 1)) / len(_PANELS)
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,136,146,0.25)"}
    layout: dict[str, Any] = {"hovermode": "closest", "showlegend": False}
    traces = []
    for index, (title, tick, curves) in enumerate(_PANELS):
        number = "" if index == 0 else str(index + 1)
        left = index * (width + _GAP)
        layout[f"xaxis{number}"] = {
            **axis, "domain": [left, left + width], "anchor": f"y{number}", "showgrid": False,
            "tickvals": list(range(len(doses))), "ticktext": [f"{dose:g}" for dose in doses], "dtick": None,
            "ticks": "outside", "ticklen": 4,
            "title": {"text": study.dose_name, "standoff": 4}, "range": [-0.4, len(doses) - 0.6],
        }  # fmt: skip
        layout[f"yaxis{number}"] = {**axis, "anchor": f"x{number}", "title": {"text": title}, "tickformat": tick}
        for metric, label, color, dash in curves:
            on = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
            points = dose_points(study, summaries, metric or study.outcome)
            if not points:
                continue
            places = [doses.index(point.dose) for point in points]
            every = [
                (place, value) for place, point in zip(places, points, strict=True) for value in point.by_seed.values()
            ]
            traces.append(_points(every, color=color, marker_opacity=_FAINT, hoverinfo="skip", **on))
            reach = [0.0 if math.isinf(point.interval[1]) else point.interval[1] - point.mean for point in points]
            means = [(place, point.mean) for place, point in zip(places, points, strict=True)]
            bars = {"array": rounded(reach), "thickness": 1.4}
            traces.append(
                line(
                    means,
                    name=label,
                    color=color,
                    dash=dash,
                    error_y=bars,
                    hovertemplate=f"{label} %{{y:.4~g}}<extra></extra>",
                    **on,
                )
            )
    return plain_figure(traces, **layout)


def _points(points: Sequence[tuple[float, float]], *, color: int, **look: Any) -> Any:
    basic = {"mode": "markers", "x": rounded([x for x, _ in points]), "hovertemplate": None}
    return line([(0, y) for _, y in points], name="", color=color, **(basic | look))
