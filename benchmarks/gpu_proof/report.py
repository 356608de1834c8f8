"""The results of a part, on the disk at once: a part that is cut off leaves what it had measured."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.preflight.page import plain, write_json
from gtpo_megatron.companions.preflight.result import CheckResult, not_here

WHOLE = "all of it"
"""What a section's last line is about."""


class Report:
    """The results of a part, section by section.

    Args:
        path: JSON file.
        facts: conditions of the measurements: device, sizes, versions.

    Attributes:
        results: lines so far; the group of each is its section.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self._facts, self._under_way = path, facts, ""
        self.results: list[CheckResult] = []
        self.save()

    def save(self) -> None:
        """Writes the file."""
        lines = [plain(one) for one in self.results]
        write_json(self._path, {"facts": self._facts, "under_way": self._under_way, "lines": lines})

    @property
    def has_failed(self) -> bool:
        """Whether a section raised, or a figure missed its bound."""
        return any(one.status == "failed" for one in self.results)

    @contextmanager
    def section(self, name: str) -> Iterator["Section"]:
        """Measures one thing; what it raises is its result, and the part goes on with the next."""
        section, self._under_way = Section(self, name), name
        self.save()
        try:
            yield section
        except Exception as error:  # noqa: BLE001 - whatever a strange machine does to one section, the others are run
            first_line = (str(error).strip() or "no message").splitlines()[0]
            logs = [f"{log}:\n{text}" for log, text in section.logs.items()]
            section.add(
                CheckResult(
                    what=WHOLE,
                    measured=f"{type(error).__name__}: {first_line}",
                    status="failed",
                    detail="\n\n".join([traceback.format_exc()[-4000:], *logs]),
                )
            )
        else:
            if section.status == "passed":
                section.add(CheckResult(what=WHOLE, measured="measured", status="passed"))
        self._under_way = ""
        self.save()
        problems = [one for one in section.results if one.status == section.status]
        reasons = "; ".join(one.measured if one.what == WHOLE else f"{one.what}: {one.measured}" for one in problems)
        shown = "" if section.status == "passed" else f": {reasons}"
        print(f"  {section.status:8} {name} ({section.results[-1].seconds:.1f} s){shown}", flush=True)


class Section:
    """Results of one thing that is measured.

    Args:
        report: report of the part.
        name: heading.

    Attributes:
        logs: ends of logs by name, shown if it fails.
    """

    def __init__(self, report: Report, name: str) -> None:
        self._report, self._name, self._began = report, name, time.perf_counter()
        self.logs: dict[str, str] = {}
        self._first = len(report.results)

    @property
    def results(self) -> list[CheckResult]:
        """Its lines so far."""
        return self._report.results[self._first :]

    @property
    def status(self) -> str:
        """``failed`` if a line has, ``not here`` if it was skipped, else ``passed``."""
        if any(one.status == "failed" for one in self.results):
            return "failed"
        return "not here" if any(one.what == WHOLE and one.status == "not here" for one in self.results) else "passed"

    def add(self, result: CheckResult) -> None:
        """A result, such as one of a preflight's checks."""
        seconds = time.perf_counter() - self._began
        self._report.results.append(replace(result, group=self._name, seconds=seconds))
        self._report.save()

    def figure(self, name: str, value: float | str, unit: str = "", **beside: float | str) -> None:
        """A measured value.

        Args:
            name: quantity.
            value: measured value.
            unit: unit of the value.
            **beside: values to compare it with, such as ``planned``.
        """
        self._figure("noted", name, value, unit, beside)

    def require(self, name: str, value: float, unit: str = "", *, at_most: float) -> None:
        """A measured value that fails its section if it is above a bound, or no number."""
        self._figure("passed" if value <= at_most else "failed", name, value, unit, {"at_most": at_most})

    def _figure(self, status: Any, name: str, value: float | str, unit: str, beside: dict[str, float | str]) -> None:
        numbers = {key: float(one) for key, one in ({"value": value} | beside).items() if not isinstance(one, str)}
        self.add(
            CheckResult(
                what=name,
                measured=f"{_shown(value)} {unit}".strip(),
                status=status,
                expected=", ".join(f"{key.replace('_', ' ')} {_shown(one)}" for key, one in beside.items()),
                figures=numbers,
            )
        )

    def skip(self, reason: str) -> None:
        """Nothing can be measured on this machine."""
        self.add(not_here(WHOLE, reason))


def _shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
