"""What ``evaluation.json`` has already: figures that must not be lost when the file is written again."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import find_json

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
        found = find_json(path)
        if found is None:
            return {}
        file = Fields(found, str(path))
        if file.raw.get("format") == FORMAT:
            return _entries(file, contents, fingerprint)
    except DataError as error:
        logger.warning("%s; it is written anew", error)
    else:
        logger.warning(
            "%s is of another format than %d and is written anew; benchmarks that are named again have their figures "
            "again, from the responses that are there",
            *(path, FORMAT),
        )
    return {}


def _entries(file: Fields, contents: Mapping[str, str], fingerprint: str) -> dict[str, Entry]:
    if file.fields("model").get("fingerprint", str) != fingerprint:
        return {}
    settings = {name: file.raw[name] for name in SETTINGS if name in file.raw}
    benchmarks = file.fields("benchmarks")
    entries = {label: _checked(benchmarks.fields(label)) for label in benchmarks.raw}
    return {
        label: {"settings": settings} | entry
        for label, entry in entries.items()
        if contents.get(label) == entry["dataset"]["content_sha256"]
    }


def _checked(fields: Fields) -> Entry:
    """An entry with all that is read of it again; what is only written again may be anything."""
    fields.fields("dataset").get("content_sha256", str)
    for name in ("num_problems", "num_complete", "samples"):
        fields.get(name, int)
    fields.get("success_threshold", float)
    for name in ("mean_at_k", "mean_reward"):
        if fields.has(name):
            fields.get(name, dict[str, float])
    for name in ("pass_at_k", "best_at_k", "maj_at_k"):
        if fields.has(name):
            fields.get(name, dict[str, dict[str, float]])
    if fields.has("earlier"):
        _checked(fields.fields("earlier"))
    return fields.raw


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
