"""``report.html``: a self-contained page of one or several runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.health.history import Finding, Level
from gtpo_megatron.companions.health.signs import assess
from gtpo_megatron.companions.report.differences import contaminated, differences
from gtpo_megatron.companions.report.figures import figures
from gtpo_megatron.companions.report.headline import headlines, summary
from gtpo_megatron.companions.report.run_data import RunData, measured_sets, read_runs
from gtpo_megatron.companions.report.samples import num_bytes, page_json, sample_section, samples
from gtpo_megatron.companions.report.token_classes import token_section
from gtpo_megatron.companions.report.traces import Figure, plain_figure, rounded
from gtpo_megatron.observability.timers import duration
from gtpo_megatron.run_folder.folder import sizes_by_label
from gtpo_megatron.run_folder.metrics_file import finite

MAX_OWN_BYTES = 3_400_000
"""Size limit without plotly's 4.8 MB and our scripts, so that a page stays below 8 MiB."""
MAX_SAMPLE_BYTES = 2_900_000
"""Size limit of all sampled groups."""
SCRIPTS = ("samples.js", "report.js")
"""Scripts of a page, in order."""


def write_report(runs: Sequence[Path], out: Path, *, dollars_per_gpu_hour: float | None = None) -> None:
    """Writes one HTML file that needs no network.

    Missing data of a run (a metric, its configuration, sampled texts) is replaced by a sentence; a cut last line of
    metrics is ignored.

    Args:
        runs: run folders; several are drawn in the same figures.
        out: the file, replaced atomically; a device or pipe is written to directly.
        dollars_per_gpu_hour: price of a GPU, for the cost of each run; None: no cost is shown.

    Raises:
        DataError: no run folder given, or one that does not exist.
        OSError: the file cannot be written.
    """
    page = document(content(read_runs(runs), dollars_per_gpu_hour=dollars_per_gpu_hour))
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


def content(runs: Sequence[RunData], *, dollars_per_gpu_hour: float | None = None) -> Content:
    """Builds the content for one or several runs."""
    still_to_come = _still_to_come(runs)
    drawn = [figure for figure in figures(runs) if not still_to_come or figure.traces]
    plots = {figure.key: plain_figure(figure.traces, **figure.layout) for figure in drawn if figure.traces}
    over = axes(runs)
    above = f"<div id='health'>{health(runs)}</div><div id='results'>{headlines(runs)}</div>"
    between = axis_switch(over) + _sections(drawn) + still_to_come
    below = "".join(_config(run) for run in runs if run.config_text)
    taken = num_bytes([plots, over]) + sum(len(part.encode("utf-8", "replace")) for part in (above, between, below))
    sampled, left_out = samples(runs, max_bytes=min(MAX_SAMPLE_BYTES, MAX_OWN_BYTES - taken))
    footer = f"<footer>gtpo-megatron {escape(__version__)}</footer>"
    return Content(
        main="".join(
            [
                heading(runs, dollars_per_gpu_hour=dollars_per_gpu_hour),
                _contents(drawn),
                _remarks(runs, left_out),
                above,
                between,
                sample_section(sampled["runs"]),
                token_section(runs),
                f"<div id='configuration'>{below}</div>",
                footer,
            ]
        ),
        data={"figures": plots, "axes": over, **sampled},
        title=f"{' · '.join(run.name for run in runs)} · training report",
    )


def document(shown: Content, *, live: str = "", scripts: Sequence[str] = SCRIPTS, plotly_at: str = "") -> str:
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
        f'<figure id="figure-{key}"><h2><a href="#figure-{key}">{escape(title)}</a> <small>{escape(unit)}</small></h2>'
        f'<div class="plot" id="plot-{key}" data-kept role="img" aria-label="{escape(title)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _asset(name: str) -> str:
    return (files("gtpo_megatron.companions.report") / "assets" / name).read_text(encoding="utf-8")


def _remarks(runs: Sequence[RunData], left_out: Sequence[str]) -> str:
    own = [(run, remark) for run in runs for remark in (*run.remarks, *contaminated(run))]
    remarks = [f"{run.name}: {remark}" if len(runs) > 1 else remark for run, remark in own]
    if len({run.num_steps_done for run in runs}) > 1:
        steps = ", ".join(f"{run.name} {run.num_steps_done}" for run in runs)
        remarks.append(f"Steps differ ({steps}): each curve, and each number below, ends at its own run's last step.")
    remarks += [*differences(runs), *left_out]
    return "".join(f'<p class="remark">{escape(remark)}</p>' for remark in remarks)


def _contents(drawn: Sequence[Figure]) -> str:
    """Links to the sections."""
    sections = dict.fromkeys(figure.section for figure in drawn)
    links = {"health": "Health", "results": "Results", **{_anchor(name): name for name in sections}}
    links |= {"responses": "Sampled responses", "configuration": "Configuration"}
    items = "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links.items())
    return f'<nav class="contents" aria-label="contents"><ul>{items}</ul></nav>'


def _anchor(section: str) -> str:
    return f"curves-{section.lower()}"


def _sections(drawn: Sequence[Figure]) -> str:
    """The figures section by section, below each those that have nothing to say, folded."""
    parts = []
    for name in dict.fromkeys(figure.section for figure in drawn):
        own = [figure for figure in drawn if figure.section == name]
        open_, folded = [each for each in own if not each.folded], [each for each in own if each.folded]
        parts.append(
            f"<section id='{_anchor(name)}'><h2 class='section'>{escape(name)}</h2>"
            f"<div class='figures'>{''.join(map(_figure, open_))}</div>{''.join(map(_folded, folded))}</section>"
        )
    return "".join(parts)


def _figure(figure: Figure) -> str:
    return plot(figure.key, figure.title, unit=figure.unit, caption=figure.caption)


def _folded(figure: Figure) -> str:
    """One line that says why; a curve that is constant may be looked at all the same."""
    about = f"<b>{escape(figure.title)}</b> {escape(figure.folded)}"
    if not figure.traces:
        return f"<p class='folded' id='figure-{figure.key}'>{about}</p>"
    return f"<details class='folded' id='folded-{figure.key}'><summary>{about}</summary>{_figure(figure)}</details>"


def _still_to_come(runs: Sequence[RunData]) -> str:
    """Text for a page without a step: what it will show, and when; empty if a run has done one."""
    if any(run.num_steps_done for run in runs):
        return ""
    lines = []
    for run in runs:
        samples, every = run.setting("evaluation.samples"), run.setting("evaluation.every_steps")
        before = (
            "its accuracy before training is above"
            if measured_sets([run])
            else "processes start, and accuracy before training is not measured"
            if run.setting("evaluation.at_start") is False
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


def _config(run: RunData) -> str:
    return (
        f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{escape(run.config_text)}</pre></details>"
    )


MAX_KNOTS = 2000
"""Steps of all runs whose sums are on the page; the page's script interpolates between them."""

STEP, TIME, SAMPLED, TRAINED = "step", "time", "sampled", "trained"
LABELS = {STEP: "step", TIME: "time", SAMPLED: "sampled tokens", TRAINED: "trained tokens"}
_COUNTS = {SAMPLED: "rollout/response_tokens_count", TRAINED: "rollout/trained_tokens_count"}


def axes(runs: Sequence[RunData]) -> dict[str, Any]:
    """Plain values for the page's script.

    Returns:
        ``names``: the axes that every run has, with their labels; ``runs``: one mapping per run, of some of its
        ``steps`` and the running sum of each axis after them.
    """
    sums = [_sums(run) for run in runs]
    names = [name for name in LABELS if name == STEP or all(name in own for own in sums)]
    tables = []
    for run, own in zip(runs, sums, strict=True):
        every = max(1, -(-len(run.metrics) * len(runs) // MAX_KNOTS))
        kept = sorted({*range(0, len(run.metrics), every), len(run.metrics) - 1} - {-1})
        steps = [run.metrics[index]["step"] for index in kept]
        columns = {name: rounded([own[name][index] for index in kept]) for name in names if name != STEP}
        tables.append({"steps": steps, **columns})
    return {"names": {name: LABELS[name] for name in names}, "runs": tables}


def axis_switch(found: dict[str, Any]) -> str:
    """The choice of the axis as HTML; empty if there is only the step."""
    if len(found["names"]) < 2:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == STEP else ""}>'
        f"<span>{label}</span></label>"
        for name, label in found["names"].items()
    )
    about = (
        "Time: of steps, evaluations and checkpoints, without the start. Tokens: of responses, those that dynamic "
        "sampling dropped counted as sampled, not as trained."
    )
    return (
        f'<div class="switch axis"><span class="name">Curves over</span>'
        f'<div class="choices" role="radiogroup" aria-label="Draw curves over">{choices}</div>'
        f'<p class="about">{about}</p></div>'
    )


def _sums(run: RunData) -> dict[str, list[float]]:
    """The running sums that the metrics of a run allow."""
    found = {}
    if any(run.training_s):
        found[TIME] = list(accumulate(run.training_s))
    for name, metric in _COUNTS.items():
        if run.values(metric):
            found[name] = list(accumulate(finite(row.get(metric)) or 0.0 for row in run.metrics))
    return found


SECONDS_PER_HOUR = 3600.0
_UNKNOWN = "unknown (log.txt does not say)"

_SETTINGS = {
    "model": "model.path", "weights in": "model.dtype", "prompts per step": "data.prompts_per_step",
    "responses per prompt": "rollout.group_size", "response limit": "rollout.sampling.max_response_tokens",
    "temperature": "rollout.sampling.temperature", "updates per rollout": "update.updates_per_rollout",
    "learning rate": "optimizer.learning_rate", "ranks": "parallel.num_ranks",
    "tensor parallel": "parallel.tensor_parallel_size", "pipeline parallel": "parallel.pipeline_parallel_size",
    "seed": "seed",
}  # fmt: skip


def heading(runs: Sequence[RunData], *, dollars_per_gpu_hour: float | None = None) -> str:
    """The head as HTML.

    Args:
        runs: one or several; only settings that all of them share are shown.
        dollars_per_gpu_hour: price of a GPU; None: no cost is shown.
    """
    if len(runs) > 1:
        title = f"{len(runs)} training runs"
        about = ", ".join(f"<b>{escape(run.name)}</b>" for run in runs)
    else:
        title = escape(str(runs[0].setting("name", runs[0].name)))
        about = f"{summary(runs[0])} · run {escape(runs[0].name)}"
    settings = {}
    for label, path in _SETTINGS.items():
        values = {_shown(run, path) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:
            settings[label] = value
    origins = "".join(
        (f"<p class='sub of-run'>{escape(run.name)}</p>" if len(runs) > 1 else "")
        + _terms("origin", origin(run, dollars_per_gpu_hour=dollars_per_gpu_hour))
        for run in runs
    )
    return f"<header><h1>{title}</h1><p class='sub'>{about}</p>{origins}{_terms('shared', settings)}</header>"


def origin(run: RunData, *, dollars_per_gpu_hour: float | None = None) -> dict[str, str]:
    """Commit, date, duration, machines and cost of a run, by their labels, as far as its log says them."""
    commits = list(dict.fromkeys(start.commit for start in run.starts if start.commit))
    machines = list(dict.fromkeys(str(start.machines) for start in run.starts if start.machines))
    seconds = sum(start.seconds for start in run.starts)
    facts = {
        "commit": ", ".join(commits) or _UNKNOWN,
        "started": f"{run.starts[0].began:%Y-%m-%d %H:%M}" if run.starts else _UNKNOWN,
        "from start to end": duration(seconds) if run.starts else _UNKNOWN,
        "machines": ", then ".join(machines) or _UNKNOWN,
    }
    if len(run.starts) > 1:
        facts["from start to end"] += f" in {len(run.starts)} starts"
    if dollars_per_gpu_hour is not None:
        facts["cost"] = _cost(run, dollars_per_gpu_hour)
    return facts


def _cost(run: RunData, rate: float) -> str:
    """The cost, and what was multiplied; a start whose machines are not known is not counted, and said so."""
    known = [(start.machines.num_gpus, start.seconds) for start in run.starts if start.machines]
    if not known:
        return "unknown: log.txt does not say on how many GPUs"
    if not any(gpus for gpus, _ in known):
        return "none: no GPU was used"
    hours = [f"{gpus} GPUs x {seconds / SECONDS_PER_HOUR:.2f} h" for gpus, seconds in known]
    total = rate * sum(gpus * seconds for gpus, seconds in known) / SECONDS_PER_HOUR
    product = hours[0] if len(hours) == 1 else f"({' + '.join(hours)})"
    missing = len(run.starts) - len(known)
    rest = f"; {missing} of {len(run.starts)} starts are not counted, on unknown machines" if missing else ""
    price = f"{rate:.2f}" if round(rate, 2) == rate else f"{rate:g}"
    return f"${total:,.2f} = {product} x ${price} a GPU and hour{rest}"


def _terms(kind: str, terms: dict[str, str]) -> str:
    inside = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in terms.items())
    return f"<dl class='settings {kind}'>{inside}</dl>"


def _shown(run: RunData, path: str) -> str | None:
    value = run.setting(path)
    if value is None:
        return None
    if path == "model.path":
        return str(value).rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)


_MARKS = {Level.GREEN: "✓", Level.AMBER: "!", Level.RED: "✕"}
"""Beside the colour: one reader in twelve cannot tell the colours apart."""


def health(runs: Sequence[RunData]) -> str:
    """One list a run, the worst sign first; green signs are folded away if others are there, or if runs are several."""
    return "".join(_one(run, is_alone=len(runs) == 1) for run in runs)


def _one(run: RunData, *, is_alone: bool) -> str:
    findings = assess(run.metrics, sizes_by_label(run.contents))
    if not findings:
        return ""
    bad = [_with_reasons(finding, run) for finding in findings if finding.level > Level.GREEN]
    green = [finding for finding in findings if finding.level == Level.GREEN]
    name = "" if is_alone else f"<h3>{escape(run.name)}</h3>"
    summary = f"{len(green)} of {len(findings)} signs are green"
    return (
        f"<section class='health' aria-label='health'>{name}{_list(bad)}"
        f"<details><summary>{_mark(Level.GREEN)} {summary}</summary>{_list(green)}</details></section>"
    )


def _with_reasons(finding: Finding, run: RunData) -> Finding:
    """Adds to the sign of missing verdicts the reasons in the log; metrics are numbers and have none."""
    if finding.sign != "graders" or not run.missing_verdicts:
        return finding
    return replace(finding, seen=f"{finding.seen}; last: {run.missing_verdicts}")


def _mark(level: Level) -> str:
    return f"<i class='{level.word}' title='{level.word}'>{_MARKS[level]}</i>"


def _list(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<li>{_mark(finding.level)}"
        f"<span><b>{escape(finding.sign)}</b> {escape(finding.seen)}<small>{escape(finding.rule)}</small></span></li>"
        for finding in findings
    )
    return f"<ul>{rows}</ul>" if rows else ""
