"""The page around the figures: what the run is, its headline numbers, and one file that needs no network."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from gtpo_megatron import __version__
from gtpo_megatron.observability.progress import duration
from gtpo_megatron.observability.report_tokens import token_view
from gtpo_megatron.observability.report_traces import Figure
from gtpo_megatron.observability.run_folder import RunData

EDGE_STEPS = 5
"""Steps averaged for the first and last reward: one step's reward is mostly noise."""
_ARROW = " <span class='to'>→</span> "
_NOTHING = "<span class='none'>-</span>"

_SETTINGS: tuple[tuple[str, str], ...] = (
    ("model", "model.path"),
    ("weights in", "model.dtype"),
    ("prompts a step", "data.prompts_per_step"),
    ("responses a prompt", "rollout.group_size"),
    ("response limit", "rollout.sampling.max_response_tokens"),
    ("temperature", "rollout.sampling.temperature"),
    ("updates a rollout", "update.updates_per_rollout"),
    ("learning rate", "optimizer.learning_rate"),
    ("ranks", "parallel.num_ranks"),
    ("tensor parallel", "parallel.tensor_parallel_size"),
    ("pipeline parallel", "parallel.pipeline_parallel_size"),
    ("seed", "seed"),
)


@dataclass(frozen=True, slots=True)
class _Headline:
    """One headline number: its label, the number as HTML, and what it is in a few words."""

    label: str
    value: Callable[[RunData], str]
    about: Callable[[RunData], str]


def page(runs: Sequence[RunData], figures: Sequence[Figure]) -> str:
    """The whole report.

    Args:
        runs: one or several.
        figures: of these runs.

    Returns:
        An HTML document that loads nothing: style, script, plotly and data are all inside.
    """
    from plotly.offline import get_plotlyjs  # plotly takes a while to import; nothing else here needs it

    drawn = [figure for figure in figures if figure.traces]
    data = {figure.key: {"data": figure.traces, "layout": figure.layout} for figure in drawn}
    title = escape(" · ".join(run.name for run in runs))
    assets = files("gtpo_megatron.observability") / "assets"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{title} · training report</title>",
            f"<style>{(assets / 'report.css').read_text(encoding='utf-8')}</style></head><body><main>",
            _heading(runs),
            _remarks(runs),
            _headlines(runs),
            '<section class="figures" aria-label="Figures">',
            *[_figure(figure) for figure in figures],
            "</section>",
            *[_responses(run, is_only=len(runs) == 1) for run in runs],
            *[_config(run) for run in runs if run.config_text],
            f"<footer>gtpo-megatron {escape(__version__)}</footer></main>",
            '<div id="readout" role="status" hidden></div>',
            f'<script type="application/json" id="figures">{_json_for_html(data)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(assets / 'report.js').read_text(encoding='utf-8')}</script></body></html>\n",
        ]
    )


def _json_for_html(data: Any) -> str:
    """JSON that no text inside it can break out of a script element with."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# ------------------------------------------------------------------------------------------------------------- heading


def _heading(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        names = ", ".join(f"<b>{escape(run.name)}</b>" for run in runs)
        return f"<header><h1>{len(runs)} training runs</h1><p class='sub'>{names}</p>{_common_settings(runs)}</header>"
    run = runs[0]
    recipe = escape(str(run.setting("name", run.name)))
    return (
        f"<header><h1>{recipe}</h1><p class='sub'>{_summary(run)} · run {escape(run.name)}</p>"
        f"<dl class='settings'>{''.join(_setting(label, _shown(run, path)) for label, path in _SETTINGS)}</dl></header>"
    )


def _summary(run: RunData) -> str:
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


def _common_settings(runs: Sequence[RunData]) -> str:
    same = [(label, shown) for label, path in _SETTINGS if len({shown := _shown(run, path) for run in runs}) == 1]
    return f"<dl class='settings'>{''.join(_setting(label, shown) for label, shown in same)}</dl>"


def _setting(label: str, shown: str | None) -> str:
    return "" if shown is None else f"<div><dt>{escape(label)}</dt><dd>{escape(shown)}</dd></div>"


def _shown(run: RunData, path: str) -> str | None:
    value = run.setting(path)
    if value is None:
        return None
    if path == "model.path":
        return str(value).rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remarks(runs: Sequence[RunData]) -> str:
    remarks = [f"{run.name}: {remark}" if len(runs) > 1 else remark for run in runs for remark in run.remarks]
    return "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)


# ----------------------------------------------------------------------------------------------------- headline numbers


def _headlines(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        cards = [
            f"<div><h2>{headline.label}</h2><p class='number'>{headline.value(runs[0])}</p>"
            f"<p class='about'>{headline.about(runs[0])}</p></div>"
            for headline in _HEADLINES
        ]
        return f'<section class="headlines" aria-label="Headline numbers">{"".join(cards)}</section>'
    head = "".join(f"<th>{headline.label}</th>" for headline in _HEADLINES)
    rows = "".join(
        f"<tr><th>{escape(run.name)}<small>{_summary(run)}</small></th>"
        + "".join(f"<td>{h.value(run)}<small>{h.about(run)}</small></td>" for h in _HEADLINES)
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


def _heldout_value(run: RunData) -> str:
    return _ends(run.values("eval/heldout_mean_at_k"), _percent)


def _heldout_about(run: RunData) -> str:
    means = run.values("eval/heldout_mean_at_k")
    if not means:
        return "not measured"
    lows, highs = run.values("eval/heldout_interval_low"), run.values("eval/heldout_interval_high")
    samples = run.setting("evaluation.samples")
    about = f"mean@{samples if samples is not None else 'k'}"
    if len(means) > 1:
        about += f", {100 * (means[-1] - means[0]):+.1f} points"
    if len(lows) == len(highs) == len(means):
        shown = [f"[{100 * lows[i]:.1f}, {100 * highs[i]:.1f}]" for i in ([0] if len(means) == 1 else [0, -1])]
        about += "; 95% intervals " + " and ".join(shown)
    return about


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
    total = sum(run.values("timing/step_s"))
    return duration(total) if total else _NOTHING


def _time_about(run: RunData) -> str:
    steps = sorted(run.values("timing/step_s"))
    if not steps:
        return "not measured"
    about = f"all steps; the median step {steps[len(steps) // 2]:.1f} s"
    speeds = sorted(run.values("throughput/tokens_per_s"))
    return about + (f", {speeds[len(speeds) // 2]:,.0f} tokens/s" if speeds else "")


def _memory_value(run: RunData) -> str:
    peaks = run.values("memory/peak_gib")
    return f"{max(peaks):.1f} GiB" if peaks else _NOTHING


def _memory_about(run: RunData) -> str:
    return "all processes of one machine" if run.values("memory/peak_gib") else "not measured"


_HEADLINES = (
    _Headline("Held-out accuracy", _heldout_value, _heldout_about),
    _Headline("Reward", _reward_value, _reward_about),
    _Headline("Log-prob gap", _gap_value, _gap_about),
    _Headline("Training time", _time_value, _time_about),
    _Headline("Peak memory", _memory_value, _memory_about),
)


# ---------------------------------------------------------------------------------------------------------- the rest


def _figure(figure: Figure) -> str:
    if not figure.traces:
        sentence = f'<p class="missing">{escape(figure.missing)}</p>'
        return f'<figure class="empty"><h2>{escape(figure.title)}</h2>{sentence}</figure>'
    return (
        f"<figure><h2>{escape(figure.title)} <small>{escape(figure.unit)}</small></h2>"
        f'<div class="plot" id="plot-{figure.key}" role="img" aria-label="{escape(figure.title)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _responses(run: RunData, *, is_only: bool) -> str:
    heading = "Sampled responses" if is_only else f"Sampled responses of {run.name}"
    step = f" <small>step {run.rollout_step}</small>" if run.rollout_step is not None else ""
    return f'<section class="responses"><h2>{escape(heading)}{step}</h2>{token_view(run)}</section>'


def _config(run: RunData) -> str:
    return (
        f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(run.config_text)}</pre></details>"
    )
