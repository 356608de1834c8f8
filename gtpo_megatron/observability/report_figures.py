"""Which figures a report has, and what each says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gtpo_megatron.observability.report_traces import Curve, Figure, Trace, bars, binned, draw_curves, line, rounded
from gtpo_megatron.observability.run_folder import RunData

STEP_STAGES = ("rollout", "reward", "score", "credit", "update", "weight_sync")
"""What ``timing/step_s`` consists of, in order."""
STAGES = (*STEP_STAGES, "evaluation", "checkpoint")
"""In the order of the colours; the last two come between steps."""

_GREEN, _RED, _ALARM = 2, 5, -1
"""Places in the palette: what is correct, what is incorrect, what must not be crossed."""
_CORRECT, _INCORRECT = Curve("", "correct", _GREEN, "dash"), Curve("", "incorrect", _RED, "dot")

_FROM_ZERO = {"yaxis": {"rangemode": "tozero"}}
_SHARE = {"yaxis": {"rangemode": "tozero", "tickformat": "~p"}}

_REWARD = Figure(
    key="reward",
    title="Reward",
    unit="mean over responses",
    caption="Outcome reward of the sampled responses, and the share of prompts with at least one correct response.",
    missing="No rewards were logged.",
    layout=_FROM_ZERO,
)
_HELDOUT = Figure(
    key="heldout",
    title="Held-out accuracy",
    unit="mean@k",
    caption="Share of correct answers to problems that are never trained on, with 95% intervals.",
    missing="The held-out set was not measured.",
    layout={"yaxis": {"tickformat": ".0%"}, "xaxis": {"rangemode": "normal"}},  # room for the interval at step 0
)
_ENTROPY = Figure(
    key="entropy",
    title="Policy entropy",
    unit="nats a token",
    caption="Mean entropy of the sampling distribution over response tokens, in all and by outcome.",
    missing="No entropies were logged.",
)
_LENGTH = Figure(
    key="length",
    title="Response length",
    unit="tokens",
    caption="Mean and longest response of each step.",
    missing="No response lengths were logged.",
    layout=_FROM_ZERO,
)
_GAP = Figure(
    key="gap",
    title="Sampler against trainer",
    unit="nats",
    caption="Difference between the log-probabilities that sampler and trainer give to the same sampled tokens, after "
    "each weight push.",
    missing="The log-prob gap between sampler and trainer was not measured.",
    layout={"yaxis": {"type": "log", "exponentformat": "power", "dtick": 1}},
)
_GROUPS = Figure(
    key="groups",
    title="Groups and cuts",
    unit="share",
    caption="Prompt groups with both right and wrong answers, the only ones that teach, and responses cut at the "
    "length limit.",
    missing="Neither mixed groups nor cut responses were logged.",
    layout=_SHARE,
)
_SIGNS = Figure(
    key="signs",
    title="Sign flips",
    unit="share of tokens",
    caption="Tokens whose advantage has the sign that their outcome has not: of correct responses below zero, of "
    "incorrect ones above.",
    missing="No signs of advantages were logged.",
    layout=_SHARE,
)
_WEIGHTS = Figure(
    key="weights",
    title="Evenness of the entropy weights",
    unit="effective share of tokens",
    caption="(sum of x)² / (N · sum of x²) for the weights x that entropy gives to N tokens: 100% where all weigh the "
    "same.",
    missing="The algorithm weighs no tokens by entropy, or it was not logged.",
    layout=_SHARE,
)
_CLIP = Figure(
    key="clip",
    title="Clipped tokens",
    unit="share",
    caption="Response tokens whose ratio to the old policy left the clip interval. With one update a rollout the ratio "
    "is 1, and nothing is clipped.",
    missing="No clip fractions were logged.",
    layout=_SHARE,
)
_GRADIENT = Figure(
    key="gradient",
    title="Gradient norm",
    unit="before clipping",
    caption="Global norm of the gradient of the step's last update.",
    missing="No gradient norms were logged.",
    layout=_FROM_ZERO,
)
_TIME = Figure(
    key="time",
    title="Time of a step",
    unit="seconds",
    caption="By stage.",
    missing="No times were logged.",
    layout={"barmode": "stack", "bargap": 0.12},
    is_wide=True,
)


def figures(runs: Sequence[RunData]) -> list[Figure]:
    """All figures, in reading order; one without traces is left out of the page with its sentence."""
    return [
        draw_curves(
            runs,
            _REWARD,
            [Curve("rollout/reward_mean", "mean"), Curve("rollout/reward_best_frac", "best of the group", 1, "dot")],
        ),
        _heldout(runs),
        draw_curves(
            runs,
            _ENTROPY,
            [
                Curve("policy/entropy_nats", "all"),
                Curve("credit/entropy_correct_nats", "correct", _GREEN, "dash"),
                Curve("credit/entropy_wrong_nats", "incorrect", _RED, "dot"),
            ],
        ),
        draw_curves(
            runs,
            _LENGTH,
            [
                Curve("rollout/response_length_tokens", "mean"),
                Curve("rollout/response_length_max_tokens", "longest", 1, "dot", is_smoothed=False),
            ],
        ),
        _logprob_gap(runs),
        draw_curves(
            runs,
            _GROUPS,
            [
                Curve("rollout/groups_mixed_frac", "mixed groups"),
                Curve("rollout/truncated_frac", "cut responses", 1, "dot"),
            ],
        ),
        draw_curves(
            runs,
            _SIGNS,
            [
                Curve("credit/correct_tokens_negative_frac", "correct, below zero", _GREEN, "dash"),
                Curve("credit/wrong_tokens_positive_frac", "incorrect, above zero", _RED, "dot"),
            ],
        ),
        draw_curves(
            runs,
            _WEIGHTS,
            [
                replace(_CORRECT, metric="credit/effective_frac_correct"),
                replace(_INCORRECT, metric="credit/effective_frac_wrong"),
            ],
        ),
        _clipped(runs),
        draw_curves(runs, _GRADIENT, [Curve("optimizer/grad_norm", "gradient norm")]),
        _stage_times(runs),
    ]


def _heldout(runs: Sequence[RunData]) -> Figure:
    samples = {run.setting("evaluation.samples") for run in runs}
    unit = f"mean@{next(iter(samples))}" if len(samples) == 1 and None not in samples else _HELDOUT.unit
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        steps, values = run.series("eval/heldout_mean_at_k")
        if not steps:
            continue
        trace = line(steps, values, name=run.name if len(runs) > 1 else unit, color=index)
        trace |= {"mode": "lines+markers", "marker": {"size": 7}, "hovertemplate": "%{y:.1%}"}
        low = dict(zip(*run.series("eval/heldout_interval_low"), strict=True))
        high = dict(zip(*run.series("eval/heldout_interval_high"), strict=True))
        if all(step in low and step in high for step in steps):
            points = list(zip(steps, values, strict=True))
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": rounded([high[step] - value for step, value in points]),
                "arrayminus": rounded([value - low[step] for step, value in points]),
                "thickness": 1.4,
                "width": 4,
            }
        traces.append(trace)
    return replace(_HELDOUT, unit=unit, traces=tuple(traces))


def _logprob_gap(runs: Sequence[RunData]) -> Figure:
    figure = draw_curves(
        runs,
        _GAP,
        [
            Curve("sync/logprob_gap_max", "largest", is_smoothed=False),
            Curve("sync/logprob_gap_mean", "mean", 1, "dot", is_smoothed=False),
        ],
    )
    if not figure.traces:
        return figure
    last = max(run.num_steps_done for run in runs)
    limits = sorted({limit for run in runs if isinstance(limit := run.setting("weight_sync.logprob_gap_limit"), float)})
    lines = [
        {
            **line([1, max(2, last)], [limit, limit], name=f"limit {limit:g}", color=_ALARM, dash="dash"),
            "hoverinfo": "skip",
        }
        for limit in limits
    ]
    return replace(figure, traces=(*figure.traces, *lines))


def _clipped(runs: Sequence[RunData]) -> Figure:
    figure = draw_curves(runs, _CLIP, [Curve("policy/clip_frac", "clipped")])
    if any(any(trace["y"]) for trace in figure.traces):
        return figure
    return replace(figure, layout={"yaxis": {**_SHARE["yaxis"], "range": [0, 0.01]}})  # else 0 to 100% for zeros


def _stage_times(runs: Sequence[RunData]) -> Figure:
    """Stacked bars: one a step of a single run, or one a run."""
    stages: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        (stage.replace("_", " "), lambda row, stage=stage: _seconds(row, stage))  # type: ignore[misc]
        for stage in STAGES
    ]
    stages.append(("other", lambda row: max(0.0, _seconds(row, "step") - sum(_seconds(row, s) for s in STEP_STAGES))))
    timed = [(run, [row for row in run.metrics if any(_seconds(row, s) for s in (*STAGES, "step"))]) for run in runs]
    timed = [(run, rows) for run, rows in timed if rows]
    if not timed:
        return _TIME
    traces: list[Trace] = []
    caption = "By stage, mean over the steps of each run." if len(runs) > 1 else "By stage, one bar a step."
    for color, (label, seconds) in enumerate(stages):
        x: Sequence[int | str]
        if len(runs) > 1:
            x, y = [run.name for run, _ in timed], [sum(map(seconds, rows)) / len(rows) for _, rows in timed]
        else:
            x, y, per_bar = binned(timed[0][1], seconds)
            if per_bar > 1:
                caption = f"By stage; each bar is the mean over {per_bar} steps."
        if any(value > 0 for value in y):
            traces.append(bars(x, y, name=label, color=color))
    return replace(_TIME, caption=caption, traces=tuple(traces))


def _seconds(row: dict[str, Any], stage: str) -> float:
    return float(row.get(f"timing/{stage}_s") or 0.0)
