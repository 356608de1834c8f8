"""The signs of each run's health, above everything else of a page."""

from collections.abc import Sequence
from html import escape

from gtpo_megatron.companions.health.assess import assess
from gtpo_megatron.companions.health.finding import Finding, Level
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.run_folder.folder import sizes_by_label

_MARKS = {Level.GREEN: "✓", Level.AMBER: "!", Level.RED: "✕"}
"""Beside the colour: one reader in twelve cannot tell the colours apart."""


def health(runs: Sequence[RunData]) -> str:
    """One list a run, the worst sign first; green signs are folded away if others are there, or if runs are several."""
    return "".join(_one(run, is_alone=len(runs) == 1) for run in runs)


def _one(run: RunData, *, is_alone: bool) -> str:
    findings = assess(run.metrics, sizes_by_label(run.contents))
    if not findings:
        return ""
    bad = [finding for finding in findings if finding.level > Level.GREEN]
    green = [finding for finding in findings if finding.level == Level.GREEN]
    name = "" if is_alone else f"<b>{escape(run.name)}</b>: "
    summary = f"{name}{len(green)} of {len(findings)} signs are green"
    return (
        f"<section class='health' aria-label='health'>{_list(bad)}"
        f"<details><summary>{_mark(Level.GREEN)} {summary}</summary>{_list(green)}</details></section>"
    )


def _mark(level: Level) -> str:
    return f"<i class='{level.word}' title='{level.word}'>{_MARKS[level]}</i>"


def _list(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<li>{_mark(finding.level)}"
        f"<span><b>{escape(finding.sign)}</b> {escape(finding.seen)}<small>{escape(finding.rule)}</small></span></li>"
        for finding in findings
    )
    return f"<ul>{rows}</ul>" if rows else ""
