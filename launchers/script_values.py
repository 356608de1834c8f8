"""Checks and quotes every value that is written into a job's scripts.

A value with a line break would add lines for Slurm, and nemo-run writes the job's name and paths without quotes.
"""

import dataclasses
import re
import shlex
import unicodedata
from collections.abc import Iterator

from gtpo_megatron.errors import ConfigError
from launchers.secret_signs import secret_in

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,99}")
PLAIN_PATH = re.compile(r"[\w./+@-]+")
"""Words that need no quotes."""

NO_TEXT = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode's categories of control characters, halves of characters, and breaks of lines and paragraphs."""

NEMO_RUN_FOLDER = "/nemo_run"
"""nemo-run replaces this path in the batch script."""


def quoted(what: str, value: object) -> str:
    """Quotes a value as one word for bash.

    Args:
        what: name of the value in messages.
        value: the value.

    Raises:
        ConfigError: it cannot be written into one line.
    """
    return shlex.quote(check_text(what, str(value)))


def check_text(what: str, value: str) -> str:
    """Checks a text, and returns it.

    Raises:
        ConfigError: it holds a line break or another control character.
    """
    for character in value:
        if unicodedata.category(character) in NO_TEXT:
            raise ConfigError(
                f"{what} {value!r}: holds {character!r}, and what goes into a job's scripts must be one line of "
                f"printable text"
            )
    return value


def check_name(what: str, value: str) -> None:
    """Checks a name for job, log files and run folder.

    Raises:
        ConfigError: it would need quotes somewhere, or is a folder's.
    """
    if not PLAIN_NAME.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r}: job and logs are named by it; use letters, digits and . _ + @ -, a letter or digit "
            f"first, 100 at most"
        )


def check_options(options: object) -> None:
    """Checks every text among the options of a launcher.

    Raises:
        ConfigError: one cannot be written into a script, or looks like a secret, which must not be.
    """
    for what, value in _texts(options):
        check_text(what, value)
        if reason := secret_in(value):
            raise ConfigError(
                f"{what}: {reason}, and what is given here is written to the disk; export it in the shell that you "
                f"submit from, Slurm takes the environment along, or name a file that you alone can read (mode 600)"
            )


def _texts(options: object) -> Iterator[tuple[str, str]]:
    """Options as the command line has them, and each of their texts."""
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value, what = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str):
                yield what, item
