"""The parts' figures in Markdown: a short table for the README, and all of them."""

from collections.abc import Iterator, Mapping
from typing import Any

_STAGES = ("a step", "generate", "score", "train", "push", "response tokens")

_TURNS = ("engine falls asleep", "the state goes to the host", "its cache wakes")

_LEARNING = (
    *("held-out accuracy before", "held-out accuracy after", "until its first row after the kill"),
    *("log-prob gap", *_STAGES),
)

_PEAKS = ("score: the trainer's peak of GPU memory", "train: the trainer's peak of GPU memory")

_RATES = (
    "score: rate",
    "score: MFU",
    "update: rate",
    "update: MFU",
    "activations of a micro-batch",
    "optimizer",
)

SHORT = {
    "run": _LEARNING,
    "recipe": (*_STAGES, *_TURNS, "train: MFU", "rate of a push", "log-prob gap", *_PEAKS),
    "preflight": ("findings: passed", "findings: failed", "findings: not run"),
    "pretrained": _LEARNING,
    "kernels": (
        "bfloat16: largest error of entropy",
        "fused: share of cuBLAS's rate",
        "fused: memory over the bare product",
        "fused_train: share of cuBLAS's rate",
        "fused_train: memory over the bare product",
    ),
    "variants": ("would be the default", "its share of cuBLAS's rate"),
    "gradients": ("mean gap of logprobs", "1 - least cosine of a tensor's gradients"),
    "training": _RATES,
    "adapters": (*_RATES, "allocated after an update", "forward_backward: peak of GPU memory"),
    "launches": (
        *("score: rate", "score: rate over that as it is", "score: MFU"),
        *("update: rate", "update: rate over that as it is", "update: MFU"),
        *("forward: launches of a layer", "forward: share of the time in kernels"),
    ),
    "push": ("rate of a push",),
    "sleep": ("left the GPU", "optimizer to the host", "optimizer from the host"),
    "engine": ("free while it sleeps",),
    "peers": ("share of cuBLAS's rate", "largest error of log-prob", "whole step", "ours over TRL's"),
    "tests": ("passed", "failed"),
}
"""What the short table has: names of figures by part, or what is before their comma."""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The machine, the short table, and a row a figure.

    Args:
        results: of each part that was run, as they are written to the JSON file.
    """
    facts: Mapping[str, Any] = next((one["facts"] for one in results.values() if one.get("facts")), {})
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    sizes = "; sizes cut down, so the figures say nothing" if facts.get("small") else ""
    lines = [
        f"{facts.get('device', 'no part has begun')}{sizes}. {versions}.",
        "",
        *_table(results, only_short=True),
        "",
        "All figures:",
        "",
        *_table(results, only_short=False),
    ]
    return "\n".join(lines) + "\n"


def _table(results: Mapping[str, Mapping[str, Any]], *, only_short: bool) -> Iterator[str]:
    yield "| part | what | figure | beside |"
    yield "|---|---|---|---|"
    for name, result in results.items():
        yield from _rows(name, result, SHORT.get(name, ()) if only_short else None)


def _rows(name: str, result: Mapping[str, Any], wanted: tuple[str, ...] | None) -> Iterator[str]:
    if result["status"] != "passed":
        yield _row(name, "the part", result["status"], result["reason"])
    for section in result.get("sections", []):
        if section["status"] != "passed":
            yield _row(name, section["name"], section["status"], section["reason"])
        for figure in section["figures"]:
            if wanted is not None and not {figure["name"], figure["name"].split(",")[0]} & set(wanted):
                continue
            told = f"{_number(figure['value'])} {figure['unit']}".strip()
            beside = [f"{key.replace('_', ' ')} {_number(value)}" for key, value in _beside(figure).items()]
            yield _row(name, f"{section['name']}: {figure['name']}", told, ", ".join(beside))


def _beside(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figure.items() if key not in ("name", "value", "unit")}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
