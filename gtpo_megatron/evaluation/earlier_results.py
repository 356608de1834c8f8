"""What ``evaluation.json`` has already: figures that must not be lost when the file is written again."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE = "evaluation.json"
FORMAT = 2

Entry = dict[str, Any]
"""What the file says of one benchmark."""

SETTINGS = ("config", "versions", "commit", "python", "platform")
"""Of the file as a whole; an entry that a later evaluation takes over keeps those that it was made with."""


def read_earlier(folder: Path, contents: Mapping[str, str], fingerprint: str) -> dict[str, Entry]:
    """The entries of an earlier evaluation, each with the ``settings`` it was made with.

    Args:
        folder: of the evaluation.
        contents: hash of each benchmark's content, by label, as its responses in the folder have it. An entry without
            its responses is left out: it cannot be told what it is of.
        fingerprint: of the model.

    Returns:
        By label; empty where there is no file, or none that can be read.
    """
    path = folder / FILE
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is written anew: %s", path, error)
        return {}
    if not isinstance(file, dict) or file.get("format") != FORMAT:
        logger.warning(
            "%s is of another format than %d and is written anew; benchmarks that are named again have their figures "
            "again, from the responses that are there",
            *(path, FORMAT),
        )
        return {}
    if file["model"]["fingerprint"] != fingerprint:
        return {}
    settings = {name: file[name] for name in SETTINGS if name in file}
    return {
        label: {"settings": settings} | entry
        for label, entry in file["benchmarks"].items()
        if contents.get(label) == entry["dataset"]["content_sha256"]
    }


def finished_figures(entry: Entry | None) -> Entry | None:
    """The last whole measurement of most problems that an entry tells of: that entry itself, or what it took over."""
    if entry is None:
        return None
    earlier: Entry | None = entry.get("earlier")
    if has_figures(entry) and entry["num_complete"] == entry["num_problems"] and not has_more(earlier, entry):
        return entry
    return earlier or (entry if has_figures(entry) else None)


def has_more(earlier: Entry | None, entry: Entry) -> bool:
    """Whether the earlier measurement is of more problems of the same set."""
    return earlier is not None and earlier["num_problems"] > entry["num_problems"]


def has_figures(entry: Entry) -> bool:
    """All of them, not only what a partial file has."""
    return "pass_at_k" in entry
