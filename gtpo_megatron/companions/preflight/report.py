"""The result of a preflight: lines for a terminal, JSON and a page."""

import html
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.markup import escape

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.preflight.finding import UNPROVEN, Line, Status, has_passed

STYLES: dict[Status, str] = {
    "passed": "green",
    "failed": "bold red",
    "not run": "bold red",
    "noted": "cyan",
    "not here": "dim",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A whole preflight.

    Attributes:
        recipe: its name.
        began: time with its zone.
        seconds: that it took.
        layout: of the trainer.
        gpus: kinds of GPUs; empty on CPUs.
        lines: in order.
    """

    recipe: str
    began: str
    seconds: float
    layout: str
    gpus: list[str]
    lines: tuple[Line, ...]

    @property
    def has_passed(self) -> bool:
        """Whether the run may be paid for."""
        return has_passed(self.lines)

    @property
    def summary(self) -> str:
        """``17 passed, 2 noted, 4 not here``."""
        counts = Counter(line.finding.status for line in self.lines)
        return ", ".join(f"{count} {status}" for status in STYLES if (count := counts[status]))


def shown_line(line: Line) -> str:
    """One line for a terminal, in rich's markup; a failure has a second one with what to do."""
    finding = line.finding
    style = STYLES[finding.status]
    text = f"[{style}]{finding.status:<8}[/] {line.check:<12} {escape(finding.what)}: {escape(finding.measured)}"
    if finding.expected:
        text += f" [dim]({escape(finding.expected)})[/]"
    if finding.remedy:
        text += f"\n{'':<22}[bold]what to do:[/] {escape(finding.remedy)}"
    return text


def to_plain(report: Report) -> dict[str, Any]:
    """Returns the report as values for JSON; figures that are not finite become null."""
    return {
        "recipe": report.recipe,
        "began": report.began,
        "seconds": round(report.seconds, 1),
        "package": __version__,
        "layout": report.layout,
        "gpus": report.gpus,
        "passed": report.has_passed,
        "summary": report.summary,
        "lines": [
            {
                "check": line.check,
                "group": line.group,
                "what": line.finding.what,
                "status": line.finding.status,
                "measured": line.finding.measured,
                "expected": line.finding.expected,
                "remedy": line.finding.remedy,
                "figures": {
                    name: value if math.isfinite(value) else None for name, value in line.finding.figures.items()
                },
                "seconds": round(line.seconds, 2),
            }
            for line in report.lines
        ],
    }


def write_json(path: Path, report: Report) -> None:
    """Writes ``preflight.json``."""
    write_file(path, json.dumps(to_plain(report), indent=1) + "\n", errors="replace")


MARKS = {"passed": "✓", "failed": "✗", "not run": "✗", "noted": "·", "not here": "-"}


def write_page(path: Path, report: Report) -> None:
    """Writes the page."""
    write_file(path, document(report), errors="replace")


def document(report: Report) -> str:
    """The whole page as an HTML document."""
    style = (files("gtpo_megatron.companions.preflight") / "page.css").read_text(encoding="utf-8")
    title = f"{report.recipe} · preflight"
    body = "".join([_heading(report), _failures(report.lines), *_groups(report.lines)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><main>{body}"
        f"<footer>gtpo-megatron {html.escape(__version__)}</footer></main></body></html>\n"
    )


def _heading(report: Report) -> str:
    status = "passed" if report.has_passed else "failed"
    gpus = ", ".join(report.gpus) or "no GPUs"
    return (
        f"<h1>{html.escape(report.recipe)} <span class='status {status}'>{status}</span></h1>"
        f"<p class='sub'>{html.escape(report.summary)} · {report.seconds:.0f} s · {html.escape(report.began)} · "
        f"{html.escape(gpus)}<br>{html.escape(report.layout)}</p>"
    )


def _failures(lines: Sequence[Line]) -> str:
    """Section with the checks that have not passed and what to do, first on the page."""
    failed = [line for line in lines if line.finding.status in UNPROVEN]
    if not failed:
        return ""
    items = "".join(
        f"<li><a href='#{html.escape(line.check)}'>{html.escape(line.check)}</a>: {html.escape(line.finding.what)}: "
        f"{html.escape(line.finding.measured)}"
        + (f"<p>{html.escape(line.finding.remedy)}</p>" if line.finding.remedy else "")
        + "</li>"
        for line in failed
    )
    return f"<section class='failures'><h2>What has not passed</h2><ul>{items}</ul></section>"


def _groups(lines: Sequence[Line]) -> Iterator[str]:
    for group, of_group in groupby(lines, key=lambda line: line.group):
        rows = "".join(
            _row(line, is_first=number == 0)
            for _, of_check in groupby(of_group, key=lambda line: line.check)
            for number, line in enumerate(of_check)
        )
        yield (
            f"<section><h2>{html.escape(group)}</h2><div class='scroll'><table><thead><tr><th>check</th><th></th>"
            f"<th>what</th><th>measured</th><th>expected</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
        )


def _row(line: Line, *, is_first: bool) -> str:
    finding = line.finding
    kind = finding.status.replace(" ", "-")
    name = f"<th scope='row' id='{html.escape(line.check)}'>{html.escape(line.check)}</th>" if is_first else "<td></td>"
    remedy = f"<p class='remedy'>{html.escape(finding.remedy)}</p>" if finding.remedy else ""
    return (
        f"<tr class='{kind}'>{name}<td class='mark' title='{html.escape(finding.status)}'>{MARKS[finding.status]} "
        f"<span>{html.escape(finding.status)}</span></td><td>{html.escape(finding.what)}</td><td>{html.escape(finding.measured)}{remedy}</td>"
        f"<td class='expected'>{html.escape(finding.expected)}</td></tr>"
    )
