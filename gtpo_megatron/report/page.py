"""``report.html``: a self-contained page of one or several runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.report.differences import contaminated, differences
from gtpo_megatron.report.figures import figures
from gtpo_megatron.report.headline import headlines, summary
from gtpo_megatron.report.health import health
from gtpo_megatron.report.run_data import RunData, measured_sets, read_runs
from gtpo_megatron.report.samples import num_bytes, page_json, sample_section, samples
from gtpo_megatron.report.traces import Figure, plain_figure

MAX_OWN_BYTES = 3_400_000
"""Size limit without plotly's 4.8 MB and our scripts, so that a page stays below 8 MiB."""
MAX_SAMPLE_BYTES = 2_900_000
"""Size limit of all sampled groups."""

_SETTINGS = {
    "model": "model.path", "weights in": "model.dtype", "prompts per step": "data.prompts_per_step",
    "responses per prompt": "rollout.group_size", "response limit": "rollout.sampling.max_response_tokens",
    "temperature": "rollout.sampling.temperature", "updates per rollout": "update.updates_per_rollout",
    "learning rate": "optimizer.learning_rate", "ranks": "parallel.num_ranks",
    "tensor parallel": "parallel.tensor_parallel_size", "pipeline parallel": "parallel.pipeline_parallel_size",
    "seed": "seed",
}  # fmt: skip


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Writes one HTML file that needs no network.

    Missing data of a run (a metric, its configuration, sampled texts) is replaced by a sentence; a cut last line of
    metrics is ignored.

    Args:
        runs: run folders; several are drawn in the same figures.
        out: the file, replaced atomically; a device or pipe is written to directly.

    Raises:
        DataError: no run folder given, or one that does not exist.
        OSError: the file cannot be written.
    """
    page = document(content(read_runs(runs)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, page, errors="replace")  # sampled text may contain surrogates


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The content of a page.

    Attributes:
        main: HTML of everything between header and footer; every text of a run is escaped.
        data: plain values for the page's script: figures and sampled groups.
        title: title of the window.
    """

    main: str
    data: dict[str, Any]
    title: str


def content(runs: Sequence[RunData]) -> Content:
    """Builds the content for one or several runs."""
    drawn = figures(runs)
    plots = {figure.key: plain_figure(figure.traces, **figure.layout) for figure in drawn if figure.traces}
    above = health(runs) + headlines(runs)
    between = "".join(
        ["<section class='figures'>", *map(_figure, drawn), "</section>", _still_to_come(runs) or _not_measured(drawn)]
    )
    below = "".join(_config(run) for run in runs if run.config_text)
    taken = num_bytes(plots) + sum(len(part.encode("utf-8", "replace")) for part in (above, between, below))
    sampled, left_out = samples(runs, max_bytes=min(MAX_SAMPLE_BYTES, MAX_OWN_BYTES - taken))
    footer = f"<footer>gtpo-megatron {escape(__version__)}</footer>"
    return Content(
        main="".join(
            [_heading(runs), _remarks(runs, left_out), above, between, sample_section(sampled), below, footer]
        ),
        data={"figures": plots, "runs": sampled},
        title=f"{' · '.join(run.name for run in runs)} · training report",
    )


def document(shown: Content, *, live: str = "", scripts: Sequence[str] = ("report.js",), plotly_at: str = "") -> str:
    """The whole page as an HTML document.

    Args:
        shown: its content.
        live: HTML above the content, for a served page.
        scripts: names of the page's scripts, in order.
        plotly_at: address of plotly's script; empty: include it in the page.
    """
    plotly = f'<script src="{plotly_at}"></script>' if plotly_at else f"<script>{plotly_script()}</script>"
    return "".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(shown.title)}</title>",
            f"<style>{_asset('report.css')}</style></head><body>{live}<main>{shown.main}</main>",
            '<div id="readout" role="status" hidden></div>',
            f'<script type="application/json" id="data">{page_json(shown.data)}</script>{plotly}',
            *[f"<script>{_asset(name)}</script>" for name in scripts],
            "</body></html>\n",
        ]
    )


def plotly_script() -> str:
    """Plotly's JavaScript."""
    from plotly.offline import get_plotlyjs  # slow to import

    script: str = get_plotlyjs()
    return script


def plot(key: str, title: str, *, unit: str, caption: str) -> str:
    """The frame of a figure as HTML; the page's script draws ``figures[key]`` in it."""
    return (
        f"<figure><h2>{escape(title)} <small>{escape(unit)}</small></h2>"
        f'<div class="plot" id="plot-{key}" data-kept role="img" aria-label="{escape(title)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _asset(name: str) -> str:
    return (files("gtpo_megatron.report") / "assets" / name).read_text(encoding="utf-8")


def _heading(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        title = f"{len(runs)} training runs"
        about = ", ".join(f"<b>{escape(run.name)}</b>" for run in runs)
    else:
        title = escape(str(runs[0].setting("name", runs[0].name)))
        about = f"{summary(runs[0])} · run {escape(runs[0].name)}"
    settings = ""
    for label, path in _SETTINGS.items():
        values = {_shown(run, path) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:  # only settings that all runs share
            settings += f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
    return f"<header><h1>{title}</h1><p class='sub'>{about}</p><dl class='settings'>{settings}</dl></header>"


def _shown(run: RunData, path: str) -> str | None:
    value = run.setting(path)
    if value is None:
        return None
    if path == "model.path":
        return str(value).rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remarks(runs: Sequence[RunData], left_out: Sequence[str]) -> str:
    own = [(run, remark) for run in runs for remark in (*run.remarks, *contaminated(run))]
    remarks = [f"{run.name}: {remark}" if len(runs) > 1 else remark for run, remark in own]
    if len({run.num_steps_done for run in runs}) > 1:
        steps = ", ".join(f"{run.name} {run.num_steps_done}" for run in runs)
        remarks.append(f"Steps differ ({steps}): each curve, and each number below, ends at its own run's last step.")
    remarks += [*differences(runs), *left_out]
    return "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)


def _figure(figure: Figure) -> str:
    return plot(figure.key, figure.title, unit=figure.unit, caption=figure.caption) if figure.traces else ""


def _still_to_come(runs: Sequence[RunData]) -> str:
    """What a page without a step will show, and when; empty if a run has done one."""
    if any(run.num_steps_done for run in runs):
        return ""
    lines = []
    for run in runs:
        samples, every = run.setting("evaluation.samples"), run.setting("evaluation.every_steps")
        before = (
            "its accuracy before training is above"
            if measured_sets([run])
            else (
                "processes start, then the held-out sets are measured before training"
                + (f" with {samples} responses a problem" if samples else "")
                + ", and that accuracy appears above"
            )
        )
        again = f"accuracy has its next point after step {every}" if every else "accuracy has its next point at the end"
        lines.append(
            f"{f'{run.name}: ' if len(runs) > 1 else ''}Step 0: {before}. Curves of reward, entropy, length, time and "
            f"memory, and sampled responses, begin with step 1; {again}."
        )
    return "".join(f'<p class="missing">{escape(line)}</p>' for line in lines)


def _not_measured(drawn: Sequence[Figure]) -> str:
    titles = [figure.title for figure in drawn if not figure.traces]
    return f'<p class="missing">Not measured: {escape(", ".join(titles))}.</p>' if titles else ""


def _config(run: RunData) -> str:
    return (
        f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(run.config_text)}</pre></details>"
    )
