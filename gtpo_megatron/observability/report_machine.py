"""Figures about the machine: time and memory by stage."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gtpo_megatron.observability.finite import finite
from gtpo_megatron.observability.report_traces import Figure, Trace, bars, binned
from gtpo_megatron.observability.run_folder import RunData

STEP_STAGES = ("rollout", "reward", "score", "credit", "update", "weight_sync")
"""What ``timing/step_s`` consists of, in order."""
STAGES = (*STEP_STAGES, "evaluation", "checkpoint")
"""In the order of the colours; the last two come between steps."""

_TIME = Figure(
    key="time",
    title="Time of a step",
    unit="seconds",
    caption="By stage.",
    missing="No times were logged.",
    layout={"barmode": "stack", "bargap": 0.12},
    is_wide=True,
)
_MEMORY = Figure(
    key="memory",
    title="Memory by stage",
    unit="GiB",
    caption="The largest sum over all processes of the driver's machine while a stage ran, over all steps; without GPU "
    "memory.",
    missing="No memory was logged by stage.",
    layout={"barmode": "group", "bargap": 0.25, "hovermode": "closest"},
)
_GPU_MEMORY = Figure(
    key="gpu-memory",
    title="GPU memory by stage",
    unit="GiB",
    caption="The largest that torch's allocator held on the fullest rank, over all steps.",
    missing="",
    layout=_MEMORY.layout,
)
_GPU_STAGES = ("score", "prepare", "forward_backward", "optimizer")


def stage_times(runs: Sequence[RunData]) -> Figure:
    """Stacked bars: one a step of a single run, or one a run."""
    stages: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        (_words(stage), lambda row, stage=stage: _seconds(row, stage))  # type: ignore[misc]
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
            x, y = [run.name for run, _ in timed], [_a_step(rows, seconds) for _, rows in timed]
        else:
            x, y, per_bar = binned(timed[0][1], seconds, _a_step)
            if per_bar > 1:
                caption = f"By stage; each bar is the mean over {per_bar} steps."
        if any(value > 0 for value in y):
            traces.append(bars(x, y, name=label, color=color))
    return replace(_TIME, caption=caption, traces=tuple(traces))


def stage_memory(runs: Sequence[RunData]) -> list[Figure]:
    """Peaks by stage, one bar a stage and run; the GPU's only where there is one."""
    main = _peaks(runs, _MEMORY, {_words(stage): f"memory/{stage}_peak_gib" for stage in STAGES})
    gpu = _peaks(runs, _GPU_MEMORY, {_words(stage): f"memory/actor_{stage}_gpu_peak_gib" for stage in _GPU_STAGES})
    return [main, gpu] if gpu.traces else [main]


def _peaks(runs: Sequence[RunData], figure: Figure, metrics: dict[str, str]) -> Figure:
    traces = []
    for color, run in enumerate(runs):
        peaks = {label: max(values) for label, name in metrics.items() if (values := run.values(name))}
        if peaks:
            trace = bars(list(peaks), list(peaks.values()), name=run.name, color=color)
            traces.append({**trace, "hovertemplate": "%{y:.2f} GiB in %{x}"})
    return replace(figure, traces=tuple(traces))


def _words(stage: str) -> str:
    return stage.replace("_", " ")


def _a_step(rows: Sequence[dict[str, Any]], seconds: Callable[[dict[str, Any]], float]) -> float:
    """The mean over steps; an evaluation before the first has a row, and is no step."""
    return sum(map(seconds, rows)) / max(1, sum(_seconds(row, "step") > 0 for row in rows))


def _seconds(row: dict[str, Any], stage: str) -> float:
    return finite(row.get(f"timing/{stage}_s")) or 0.0
