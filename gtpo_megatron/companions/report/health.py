"""The signs of each run's health, above everything else of a page."""

from collections.abc import Sequence
from html import escape

from gtpo_megatron.companions.health.judge import judge
from gtpo_megatron.companions.health.verdict import Level, Verdict
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.run_folder.data_file import sizes_by_label

_MARKS = {Level.GREEN: "✓", Level.AMBER: "!", Level.RED: "✕"}
"""Beside the colour: one reader in twelve cannot tell the colours apart."""


def health(runs: Sequence[RunData]) -> str:
    """One list a run, the worst sign first; green signs are folded away if others are there, or if runs are several."""
    return "".join(_one(run, is_alone=len(runs) == 1) for run in runs)


def _one(run: RunData, *, is_alone: bool) -> str:
    verdicts = judge(run.metrics, sizes_by_label(run.contents))
    if not verdicts:
        return ""
    bad = [verdict for verdict in verdicts if verdict.level > Level.GREEN]
    green = [verdict for verdict in verdicts if verdict.level == Level.GREEN]
    name = "" if is_alone else f"<b>{escape(run.name)}</b>: "
    summary = f"{name}{len(green)} of {len(verdicts)} signs are green"
    return (
        f"<section class='health' aria-label='health'>{_list(bad)}"
        f"<details><summary>{_mark(Level.GREEN)} {summary}</summary>{_list(green)}</details></section>"
    )


def _mark(level: Level) -> str:
    return f"<i class='{level.word}' title='{level.word}'>{_MARKS[level]}</i>"


def _list(verdicts: Sequence[Verdict]) -> str:
    rows = "".join(
        f"<li>{_mark(verdict.level)}"
        f"<span><b>{escape(verdict.sign)}</b> {escape(verdict.seen)}<small>{escape(verdict.rule)}</small></span></li>"
        for verdict in verdicts
    )
    return f"<ul>{rows}</ul>" if rows else ""
