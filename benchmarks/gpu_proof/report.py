"""What a part of the proof has found, on the disk at once: a part that is cut off leaves what it had measured."""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Replaces a file, so that nobody ever reads half of one."""
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


class Report:
    """The sections of a part.

    Args:
        path: of its JSON file.
        facts: what the figures depend on: device, sizes, versions.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self._content: dict[str, Any] = {"facts": facts, "sections": []}
        self.save()

    def save(self) -> None:
        """Writes the file."""
        write_json(self._path, self._content)

    @property
    def has_failed(self) -> bool:
        """Whether a section raised, or a figure missed its bound."""
        return any(section["status"] == "failed" for section in self._content["sections"])

    @contextmanager
    def section(self, name: str) -> Iterator["Section"]:
        """Measures one thing; what it raises is its result, and the part goes on with the next."""
        section = Section(name, self.save)
        self._content["sections"].append(section.content)
        self.save()
        began = time.perf_counter()
        try:
            yield section
        except Exception as error:  # noqa: BLE001 - whatever a strange machine does to one section, the others are run
            first_line = (str(error).strip() or "no message").splitlines()[0]
            section.content |= {
                "status": "failed",
                "reason": f"{type(error).__name__}: {first_line}",
                "traceback": traceback.format_exc()[-4000:],
            }
        else:
            if section.content["status"] == "begun":
                section.content["status"] = "passed"
        section.content["seconds"] = round(time.perf_counter() - began, 2)
        self.save()
        told = f": {section.content['reason']}" if section.content["reason"] else ""
        print(f"  {section.content['status']:7} {name} ({section.content['seconds']:.1f} s){told}", flush=True)


class Section:
    """Figures of one thing that is measured.

    Attributes:
        content: as it is written to the disk.
    """

    def __init__(self, name: str, save: Any) -> None:
        self._save = save
        self.content: dict[str, Any] = {"name": name, "status": "begun", "reason": "", "figures": []}

    def figure(self, name: str, value: float | str, unit: str = "", **beside: float | str) -> None:
        """A measured value.

        Args:
            name: of the quantity.
            value: measured.
            unit: of the value.
            **beside: what it is to be compared with, such as ``planned``.
        """
        self.content["figures"].append({"name": name, "value": value, "unit": unit, **beside})
        self._save()

    def require(self, name: str, value: float, unit: str = "", *, at_most: float) -> None:
        """A measured value that fails its section if it is above a bound, or no number."""
        self.figure(name, value, unit, at_most=at_most)
        if not value <= at_most:
            reason = f"{name} is {value:.3g} {unit}".rstrip() + f", at most {at_most:g} is right"
            before = self.content["reason"]
            self.content |= {"status": "failed", "reason": f"{before}; {reason}" if before else reason}

    def skip(self, reason: str) -> None:
        """Nothing can be measured on this machine."""
        self.content |= {"status": "skipped", "reason": reason}
