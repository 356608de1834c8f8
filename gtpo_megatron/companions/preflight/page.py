"""Results as a page and as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.preflight.result import UNPROVEN, CheckResult, has_passed, summary


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Results of one call of a command.

    Attributes:
        command: name for the page's title.
        title: name of the recipe or device.
        began: time with its zone.
        seconds: duration of the checks.
        facts: conditions of the measurements, by name: texts, or lists of texts.
        results: results of the checks in order.
    """

    command: str
    title: str
    began: str
    seconds: float
    facts: Mapping[str, str | list[str]]
    results: Sequence[CheckResult]

    @property
    def has_passed(self) -> bool:
        """Whether something passed, and nothing failed or was not run."""
        return has_passed(self.results)

    @property
    def summary(self) -> str:
        """``17 passed, 2 noted, 4 not here``."""
        return summary(self.results)


def write_json(path: Path, content: Any) -> None:
    """Replaces a JSON file."""
    write_file(path, json.dumps(content, indent=1) + "\n", errors="replace")


def plain(result: CheckResult) -> dict[str, Any]:
    """A result as values for JSON; figures that are not finite become null, an empty detail is left out."""
    figures = {name: value if math.isfinite(value) else None for name, value in result.figures.items()}
    values = asdict(result) | {"figures": figures, "seconds": round(result.seconds, 2)}
    if not result.detail:
        del values["detail"]
    return values


def write_page(path: Path, report: Report) -> None:
    """Writes the page."""
    write_file(path, document(report), errors="replace")


def document(report: Report) -> str:
    """The whole page as an HTML document."""
    style = (files("gtpo_megatron.companions.preflight") / "page.css").read_text(encoding="utf-8")
    body = "".join([_heading(report), _failures(report.results), *_groups(report.results)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)} · {escape(report.command)}</title><style>{style}</style></head><body><main>"
        f"{body}<footer>gtpo-megatron {escape(__version__)}</footer></main></body></html>\n"
    )


def _heading(report: Report) -> str:
    status = "passed" if report.has_passed else "failed"
    facts = "<br>".join(
        f"{escape(name)}: {escape(value if isinstance(value, str) else ', '.join(value) or 'none')}"
        for name, value in report.facts.items()
    )
    return (
        f"<h1>{escape(report.title)} <span class='status {status}'>{status}</span></h1>"
        f"<p class='sub'>{escape(report.summary)} · {report.seconds:.0f} s · {escape(report.began)}<br>{facts}</p>"
    )


def _failures(results: Sequence[CheckResult]) -> str:
    """Section with the checks that have not passed and what to do, first on the page."""
    failed = [result for result in results if result.status in UNPROVEN]
    if not failed:
        return ""
    items = "".join(
        f"<li><a href='#{escape(one.check)}'>{escape(one.check)}</a>: {escape(one.what)}: {escape(one.measured)}"
        + (f"<p>{escape(one.remedy)}</p>" if one.remedy else "")
        + "</li>"
        for one in failed
    )
    return f"<section class='failures'><h2>What has not passed</h2><ul>{items}</ul></section>"


def _groups(results: Sequence[CheckResult]) -> Iterator[str]:
    linked: set[str] = set()
    for group, in_group in groupby(results, key=lambda result: result.group):
        rows, last = [], None
        for result in in_group:
            name = escape(result.check)
            link = "" if result.check in linked else f" id='{name}'"
            rows.append(_row(result, f"<th scope='row'{link}>{name}</th>" if result.check != last else "<td></td>"))
            last = result.check
            linked.add(last)
        yield (
            f"<section><h2>{escape(group)}</h2><div class='scroll'><table><thead><tr><th>check</th><th></th>"
            f"<th>what</th><th>measured</th><th>expected</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
            "</section>"
        )


MARKS = {"passed": "✓", "failed": "✗", "not run": "✗", "noted": "·", "not here": "-"}


def _row(result: CheckResult, name: str) -> str:
    remedy = f"<p class='remedy'>{escape(result.remedy)}</p>" if result.remedy else ""
    detail = f"<details><summary>more</summary><pre>{escape(result.detail)}</pre></details>" if result.detail else ""
    return (
        f"<tr class='{result.status.replace(' ', '-')}'>{name}<td class='mark' title='{escape(result.status)}'>"
        f"{MARKS[result.status]} <span>{escape(result.status)}</span></td><td>{escape(result.what)}</td>"
        f"<td>{escape(result.measured)}{remedy}{detail}</td><td class='expected'>{escape(result.expected)}</td></tr>"
    )
