"""The parts' results in Markdown: a short table for the README, and all of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu_proof.catalogue import PARTS
from benchmarks.gpu_proof.report import WHOLE
from gtpo_megatron.companions.preflight.result import UNPROVEN, CheckResult


def facts_of(parts: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the figures depend on, of the first part that knows."""
    return next((part["facts"] for part in parts.values() if part.get("facts")), {})


def results_of(parts: Mapping[str, Mapping[str, Any]]) -> list[CheckResult]:
    """The lines of all parts, and one for a part that did not pass.

    Args:
        parts: those that were run, as they are written to the JSON file.
    """
    found: list[CheckResult] = []
    for name, part in parts.items():
        if part["status"] != "passed":
            status: Any = {"skipped": "not here", "not run": "not run"}.get(part["status"], "failed")
            reason = f"cut off {part['reason']}" if part["status"] == "cut off" else part["reason"]
            found.append(CheckResult(check=name, group=name, what="the part", measured=reason, status=status))
        found += [CheckResult(**line | {"check": name}) for line in part.get("lines", [])]
    return found


def values_of(part: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Measured values of one section by name; texts where they are no numbers."""
    lines = [line for line in part["lines"] if line["group"] == section]
    return {line["what"]: line["figures"].get("value", line["measured"]) for line in lines}


def markdown(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The machine, the short table, and a row a result."""
    facts, results = facts_of(parts), results_of(parts)
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    sizes = "; sizes cut down, so the figures say nothing" if facts.get("small") else ""
    short = {part.name: set(part.short) for part in PARTS}
    wanted = [one for one in results if one.status in UNPROVEN or {one.what, one.what.split(",")[0]} & short[one.check]]
    head = f"{facts.get('device', 'no part has begun')}{sizes}. {versions}."
    return "\n".join([head, "", *_table(wanted), "", "All figures:", "", *_table(results)]) + "\n"


def _table(results: list[CheckResult]) -> Iterator[str]:
    yield "| part | what | figure | beside |"
    yield "|---|---|---|---|"
    for one in results:
        if one.what == WHOLE and one.status == "passed":
            continue
        heading = "" if one.group == one.check else f"{one.group}: "
        status = "" if one.status in ("passed", "noted") else f"{one.status}: "
        cells = (one.check, f"{heading}{one.what}", f"{status}{one.measured}", one.expected)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
