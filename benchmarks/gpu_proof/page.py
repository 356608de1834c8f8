"""The parts' figures as one Markdown table."""

from collections.abc import Iterator, Mapping
from typing import Any


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A heading with the machine, and a row a figure.

    Args:
        results: of each part that was run, as they are written to the JSON file.
    """
    facts: Mapping[str, Any] = next((one["facts"] for one in results.values() if one.get("facts")), {})
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    sizes = "; sizes cut down, so the figures say nothing" if facts.get("small") else ""
    lines = [
        f"{facts.get('device', 'no part has begun')}{sizes}. {versions}.",
        "",
        "| part | what | figure | beside |",
        "|---|---|---|---|",
        *(row for name, result in results.items() for row in _rows(name, result)),
    ]
    return "\n".join(lines) + "\n"


def _rows(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    if result["status"] != "passed":
        yield _row(name, "the part", result["status"], result["reason"])
    for section in result.get("sections", []):
        if section["status"] != "passed":
            yield _row(name, section["name"], section["status"], section["reason"])
        for figure in section["figures"]:
            told = f"{_number(figure['value'])} {figure['unit']}".strip()
            beside = [f"{key.replace('_', ' ')} {_number(value)}" for key, value in _beside(figure).items()]
            yield _row(name, f"{section['name']}: {figure['name']}", told, ", ".join(beside))


def _beside(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figure.items() if key not in ("name", "value", "unit")}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
