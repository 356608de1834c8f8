"""The page around the figures: what the run is, its headline numbers, and one file that needs no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from gtpo_megatron import __version__
from gtpo_megatron.observability.page_json import num_bytes, page_json
from gtpo_megatron.observability.report_differences import differences
from gtpo_megatron.observability.report_figures import figures
from gtpo_megatron.observability.report_headline import headlines, summary
from gtpo_megatron.observability.report_sample_section import sample_section
from gtpo_megatron.observability.report_samples import MAX_BYTES, samples
from gtpo_megatron.observability.report_traces import Figure
from gtpo_megatron.observability.run_folder import RunData

MAX_OWN_BYTES = 3_400_000
"""Of a page besides plotly's 4.8 MB and our own scripts, so that all stays below 8 MiB."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a page shows.

    Attributes:
        main: HTML of everything between header and footer; every text of a run is escaped.
        data: plain values for the page's script: figures and sampled groups.
        title: of the window.
    """

    main: str
    data: dict[str, Any]
    title: str


def content(runs: Sequence[RunData]) -> Content:
    """Draws one or several runs."""
    drawn = figures(runs)
    plots = {figure.key: {"data": figure.traces, "layout": figure.layout} for figure in drawn if figure.traces}
    above = headlines(runs)
    between = "".join(
        ['<section class="figures" aria-label="Figures">', *[_figure(figure) for figure in drawn], "</section>"]
    )
    below = "".join(_config(run) for run in runs if run.config_text)
    taken = num_bytes(plots) + sum(len(part.encode("utf-8", "replace")) for part in (above, between, below))
    sampled = samples(runs, max_bytes=min(MAX_BYTES, MAX_OWN_BYTES - taken))
    main = [
        _heading(runs),
        _remarks(runs, sampled.remarks),
        above,
        between,
        sample_section(sampled),
        below,
        f"<footer>gtpo-megatron {escape(__version__)}</footer>",
    ]
    return Content(
        main="".join(main),
        data={"figures": plots, "runs": sampled.runs},
        title=f"{' · '.join(run.name for run in runs)} · training report",
    )


def document(shown: Content, *, scripts: Sequence[str] = ("report_samples.js", "report.js")) -> str:
    """The whole page as an HTML document that loads nothing: style, script, plotly and data are all inside.

    Args:
        shown: what is on it.
        scripts: assets that draw it, in order.
    """
    from plotly.offline import get_plotlyjs  # plotly takes a while to import; nothing else here needs it

    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(shown.title)}</title>",
            f"<style>{asset('report.css')}</style></head><body><main>{shown.main}</main>",
            '<div id="readout" role="status" hidden></div>',
            f'<script type="application/json" id="data">{page_json(shown.data)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            *[f"<script>{asset(name)}</script>" for name in scripts],
            "</body></html>\n",
        ]
    )


def asset(name: str) -> str:
    """A file of ``assets/``."""
    return (files("gtpo_megatron.observability") / "assets" / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- heading


def _heading(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        names = ", ".join(f"<b>{escape(run.name)}</b>" for run in runs)
        return f"<header><h1>{len(runs)} training runs</h1><p class='sub'>{names}</p>{_common_settings(runs)}</header>"
    run = runs[0]
    recipe = escape(str(run.setting("name", run.name)))
    return (
        f"<header><h1>{recipe}</h1><p class='sub'>{summary(run)} · run {escape(run.name)}</p>"
        f"<dl class='settings'>{''.join(_setting(label, _shown(run, path)) for label, path in _SETTINGS)}</dl></header>"
    )


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


def _remarks(runs: Sequence[RunData], more: Sequence[str]) -> str:
    remarks = [f"{run.name}: {remark}" if len(runs) > 1 else remark for run in runs for remark in run.remarks]
    if len({run.num_steps_done for run in runs}) > 1:
        steps = ", ".join(f"{run.name} {run.num_steps_done}" for run in runs)
        remarks.append(f"Steps differ ({steps}): each curve, and each number below, ends at its own run's last step.")
    remarks += differences(runs)
    remarks += more
    return "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)


# ---------------------------------------------------------------------------------------------------------- the rest


def _figure(figure: Figure) -> str:
    if not figure.traces:
        sentence = f'<p class="missing">{escape(figure.missing)}</p>'
        return f'<figure class="empty"><h2>{escape(figure.title)}</h2>{sentence}</figure>'
    width = ' class="wide"' if figure.is_wide else ""
    return (
        f"<figure{width}><h2>{escape(figure.title)} <small>{escape(figure.unit)}</small></h2>"
        f'<div class="plot" id="plot-{figure.key}" role="img" aria-label="{escape(figure.title)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _config(run: RunData) -> str:
    return (
        f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(run.config_text)}</pre></details>"
    )
