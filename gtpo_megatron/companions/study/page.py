"""The table and the curves of a study as one self-contained page, and the table alone as Markdown."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.report.page import Content, document, plot
from gtpo_megatron.companions.report.traces import PALETTE, line, plain_figure
from gtpo_megatron.companions.study.drawings import dose_figure, forest_figure, forest_rows
from gtpo_megatron.companions.study.finished import find_runs
from gtpo_megatron.companions.study.plan import Study
from gtpo_megatron.companions.study.run_summary import FinishedRun, of_arm
from gtpo_megatron.companions.study.table import (
    HEADINGS,
    PLANNED_HEADINGS,
    ArmRow,
    arm_rows,
    cells,
    kinds_headings,
    kinds_legend,
    kinds_rows,
    markdown,
    notes,
    planned_cells,
    planned_rows,
)

_FIGURES: tuple[tuple[str, str, str, str], ...] = (
    ("eval/heldout_mean_at_k", "Held-out accuracy", "mean@k", ".0%"),
    ("rollout/reward_mean", "Reward", "mean over responses", ""),
    ("policy/entropy_nats", "Policy entropy", "nats a token", ""),
    ("rollout/response_length_tokens", "Response length", "tokens", ""),
    ("credit/one_sided_groups_frac", "One-sided groups", "share", ".0%"),
    ("credit/effective_frac_correct", "Evenness of weights, correct", "effective share of tokens", ".0%"),
    ("credit/correct_tokens_negative_frac", "Correct tokens below zero", "share of tokens", ".0%"),
    ("credit/incorrect_tokens_positive_frac", "Incorrect tokens above zero", "share of tokens", ".0%"),
)
"""Metric, title, unit, and format of the axis."""
MAX_BANDS = 5
"""Arms up to which a curve has a band over seeds; more of them cover each other."""


def write_results(study: Study, folders: Sequence[Path], runs_dir: Path, *, num_steps: int, suffix: str) -> str:
    """Writes table and page of all finished runs with the study's settings and seeds.

    Its seeds are those up to the last in its own folder, so that its arms have the same ones wherever they come from.

    Args:
        study: the plan.
        folders: of finished runs; the first is the study's own, and has ``table.md``.
        runs_dir: folder of ``study.html``.
        num_steps: steps of the runs.
        suffix: suffix of both file names.

    Returns:
        A sentence about the files written.

    Raises:
        OSError: one cannot be written.
    """
    arms = [arm.name for arm in study.arms]
    output, found = folders[0], find_runs(study, folders, num_steps=num_steps)
    # another study's folder may have more seeds, of some arms only
    own_seeds = (summary.seed for summary in found.runs if summary.name in found.own)
    last_seed = max(own_seeds, default=study.first_seed + study.num_seeds - 1)
    summaries = [summary for summary in found.runs if summary.seed <= last_seed]
    left_out = f" ({len(found.others)} with other settings left out)" if found.others else ""
    rows = arm_rows(study, summaries, arms)
    if summaries and not rows:
        return f"none of {len(summaries)} finished runs in {output} has measured {study.outcome} {study.outcome_time}"
    if not rows:
        is_there = "" if output.is_dir() else f"; there is no folder {output}"
        return f"no finished run of {num_steps} steps with the study's settings in {output} yet{left_out}{is_there}"
    table, page = output / f"table{suffix}.md", runs_dir / f"study{suffix}.html"
    output.mkdir(parents=True, exist_ok=True)  # it has no run of its own if all are shared
    write_file(table, markdown(study, rows, summaries))
    runs_dir.mkdir(parents=True, exist_ok=True)
    write_file(page, study_page(study, rows, summaries))
    return f"{len(summaries)} runs{left_out}: {table}, {page}"


def study_page(study: Study, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]) -> str:
    """An HTML document that loads nothing.

    Args:
        study: the plan.
        rows: rows of the table.
        summaries: finished runs of these arms, whose curves are drawn: the mean over seeds and their range.
    """
    drawn = {metric: _figure(metric, rows, summaries, tick) for metric, _, _, tick in _FIGURES}
    figures = {metric.replace("/", "-"): figure for metric, figure in drawn.items() if figure["data"]}
    wide = _wide_figures(study, rows, summaries)
    figures |= {key: figure for key, _, _, _, figure in wide}
    steps = sorted({summary.num_steps for summary in summaries})
    main = [
        f"<header><h1>{escape(study.name)}</h1><p class='sub'>{len(summaries)} runs of "
        f"{' or '.join(map(str, steps))} steps, {len(rows)} arms</p></header>",
        _planned_table(study, summaries),
        _table(study, rows),
        *(f'<p class="note">{escape(part)}</p>' for part in notes(study, rows, summaries)),
        '<section class="figures" style="margin-top:40px" aria-label="Figures">',
    ]
    for key, title, unit, caption, _ in wide:
        main.append(f'<div class="wide">{plot(key, title, unit=unit, caption=caption)}</div>')
    for metric, title, unit, _ in _FIGURES:
        if drawn[metric]["data"]:
            band = "; band: from the lowest to the highest seed" if len(rows) <= MAX_BANDS else ""
            caption = f"Line: mean over seeds{band}."
            main.append(plot(metric.replace("/", "-"), title, unit=unit, caption=caption))
    main.append("</section>")
    if kinds := kinds_rows(rows, summaries):
        main += [
            "<details><summary>Where the credit goes, by kinds of tokens</summary>",
            _html_table(kinds_headings(rows), kinds, marked=-1),
            f'<p class="about">{escape(kinds_legend())}</p></details>',
        ]
    abouts = "".join(
        f"<div><dt>{escape(row.label)}</dt><dd>{escape(study.arm(row.name).about)}</dd></div>" for row in rows
    )
    main.append(f'<details open><summary>Arms</summary><dl class="arms">{abouts}</dl></details>')
    return document(Content(main="".join(main), data={"figures": figures, "runs": []}, title=study.name))


def _wide_figures(
    study: Study, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun]
) -> list[tuple[str, str, str, str, dict[str, Any]]]:
    """Key, title, unit, caption and figure."""
    wide = []
    if forest := forest_rows(study, summaries, [row.name for row in rows]):
        caption = "Diamond: mean difference over seeds, with its 95% t interval; dots: the seeds. Blue: planned."
        title = next((title for metric, title, _, _ in _FIGURES if metric == study.outcome), study.outcome)
        wide.append(("forest", "Differences", f"points of {title.lower()}", caption, forest_figure(forest)))
    dose = dose_figure(study, summaries) if study.dose else {"data": []}
    if dose["data"]:
        caption = (
            "Lines: means over seeds, with 95% t intervals; dots: the seeds. Accuracy: after the last step; the "
            "others: over the last quarter of the steps. Signs: dashed, correct and below zero; dotted, incorrect and "
            "above it."
        )
        wide.append(("dose", f"Over {study.dose_name}", "", caption, dose))
    return wide


def _planned_table(study: Study, summaries: Sequence[FinishedRun]) -> str:
    rows = planned_rows(study, summaries)
    return _html_table(PLANNED_HEADINGS, [planned_cells(study, row) for row in rows], marked=-1) if rows else ""


def _table(study: Study, rows: Sequence[ArmRow]) -> str:
    baseline = next((index for index, row in enumerate(rows) if row.name == study.baseline), -1)
    return _html_table(HEADINGS, [cells(row) for row in rows], marked=baseline)


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = ""
    for index, (first, *rest) in enumerate(rows):
        mark = " <small>baseline</small>" if index == marked else ""
        body += f"<tr><th>{escape(first)}{mark}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
    return f'<div class="scroll"><table class="dense"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(metric: str, rows: Sequence[ArmRow], summaries: Sequence[FinishedRun], tick: str) -> dict[str, Any]:
    traces: list[Any] = []
    for color, row in enumerate(rows):
        curves = [run.curves[metric] for run in of_arm(summaries, row.name).values() if metric in run.curves]
        if not curves:
            continue
        by_step: dict[int, list[float]] = {}
        for curve in curves:
            for step, value in curve:
                by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        if len(curves) > 1 and len(rows) <= MAX_BANDS:
            highs, lows = [max(by_step[step]) for step in steps], [min(by_step[step]) for step in steps]
            band = [*zip(steps, highs, strict=True), *reversed([*zip(steps, lows, strict=True)])]
            look: dict[str, Any] = {
                "mode": "lines",
                "fill": "toself",
                "opacity": 0.25,
                "line_width": 0,
                "showlegend": False,
            }
            traces.append(line(band, name=row.label, color=color, legendgroup=row.name, hoverinfo="skip", **look))
        means = [(step, fmean(by_step[step])) for step in steps]
        dash = "solid" if color < len(PALETTE) else "dash"  # the second arm of a colour
        traces.append(line(means, name=row.label, color=color, dash=dash, legendgroup=row.name))
    return plain_figure(traces, **({"yaxis_tickformat": tick} if tick else {}))
