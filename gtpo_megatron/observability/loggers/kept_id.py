"""The id of a run at a logger, kept in the run folder so that a resumed run continues it."""

import uuid
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import bare_name, find_text

LENGTH = 12
"""Hexadecimal digits of a new id."""


def kept_id(file: Path) -> str | None:
    """The id that a file holds; None if there is no such file, or it is empty.

    Raises:
        ConfigError: what it holds is no id.
    """
    found = find_text(file, error=ConfigError)
    return bare_name(found.strip(), str(file), ConfigError) if found else None


def keep_id(file: Path, run_id: str) -> None:
    """Writes the id."""
    write_file(file, f"{run_id}\n")


def new_or_kept_id(file: Path) -> str:
    """The id that the file holds, or a new one, which it holds from now on."""
    run_id = kept_id(file) or uuid.uuid4().hex[:LENGTH]
    keep_id(file, run_id)
    return run_id
