"""The result of a preflight: lines for a terminal, and JSON."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from gtpo_megatron import __version__
from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.companions.preflight.finding import Line, Status, has_passed

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
