"""``data.json``: the data sets of a run.

::

    {"train": {"origin": "/data/dapo.parquet", "problems": 17398, "problems_sha256": "6f3a..."},
     "eval/aime24": {"origin": ..., "problems": 30, "problems_sha256": ...}}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gtpo_megatron.untrusted.fields import as_kind
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_text, printable

DATA_FILE = "data.json"

SHOWN_DIGITS = 16
"""Digits of a hash in messages."""

TRAIN = "train"
"""Name of the training set; held-out sets have the prefix of their metrics: ``eval/aime24``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataContent:
    """The content of a data set.

    Attributes:
        origin: the file, or the hub's repository and commit.
        problems: number of problems.
        problems_sha256: digest of their prompts and answers, in order.
    """

    origin: str
    problems: int
    problems_sha256: str

    def __str__(self) -> str:
        """A short form for messages."""
        return f"{self.origin} with problems {self.problems_sha256[:SHOWN_DIGITS]}"


def sizes_by_label(contents: Mapping[str, DataContent]) -> dict[str, int]:
    """Number of problems of each held-out set, by its label."""
    prefix = heldout_name("")
    return {
        name.removeprefix(prefix): content.problems for name, content in contents.items() if name.startswith(prefix)
    }


def heldout_name(label: str) -> str:
    """Name of a held-out set by its label."""
    return f"eval/{label}"


def contents_text(contents: Mapping[str, DataContent]) -> str:
    """The file's text."""
    return json.dumps({name: asdict(content) for name, content in contents.items()}, indent=2) + "\n"


def read_contents(folder: Path) -> dict[str, DataContent]:
    """Reads the file of a run folder; empty if there is none.

    Raises:
        DataError: it cannot be read.
    """
    text = find_text(folder / DATA_FILE)
    if text is None:
        return {}
    place = printable(folder / DATA_FILE)
    found: dict[str, DataContent] = as_kind(parse_json(text, place), dict[str, DataContent], f"{place}: it")
    return found
