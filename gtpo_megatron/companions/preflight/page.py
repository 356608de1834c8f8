"""``preflight.html``: the lines of a preflight as a page that needs no network and no script."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.preflight.finding import UNPROVEN, Line
from gtpo_megatron.companions.preflight.report import Report

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
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}"
        f"<footer>gtpo-megatron {escape(__version__)}</footer></main></body></html>\n"
    )


def _heading(report: Report) -> str:
    status = "passed" if report.has_passed else "failed"
    gpus = ", ".join(report.gpus) or "no GPUs"
    return (
        f"<h1>{escape(report.recipe)} <span class='status {status}'>{status}</span></h1>"
        f"<p class='sub'>{escape(report.summary)} · {report.seconds:.0f} s · {escape(report.began)} · "
        f"{escape(gpus)}<br>{escape(report.layout)}</p>"
    )


def _failures(lines: Sequence[Line]) -> str:
    """Section with the checks that have not passed and what to do, first on the page."""
    failed = [line for line in lines if line.finding.status in UNPROVEN]
    if not failed:
        return ""
    items = "".join(
        f"<li><a href='#{escape(line.check)}'>{escape(line.check)}</a>: {escape(line.finding.what)}: "
        f"{escape(line.finding.measured)}"
        + (f"<p>{escape(line.finding.remedy)}</p>" if line.finding.remedy else "")
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
            f"<section><h2>{escape(group)}</h2><div class='scroll'><table><thead><tr><th>check</th><th></th>"
            f"<th>what</th><th>measured</th><th>expected</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
        )


def _row(line: Line, *, is_first: bool) -> str:
    finding = line.finding
    kind = finding.status.replace(" ", "-")
    name = f"<th scope='row' id='{escape(line.check)}'>{escape(line.check)}</th>" if is_first else "<td></td>"
    remedy = f"<p class='remedy'>{escape(finding.remedy)}</p>" if finding.remedy else ""
    return (
        f"<tr class='{kind}'>{name}<td class='mark' title='{escape(finding.status)}'>{MARKS[finding.status]} "
        f"<span>{escape(finding.status)}</span></td><td>{escape(finding.what)}</td><td>{escape(finding.measured)}{remedy}</td>"
        f"<td class='expected'>{escape(finding.expected)}</td></tr>"
    )
