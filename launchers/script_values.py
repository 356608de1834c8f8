"""Checks and quotes every value that is written into a job's scripts.

A value with a line break would add lines for Slurm, and nemo-run writes the job's name and paths without quotes.
"""

import dataclasses
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator

from gtpo_megatron.errors import ConfigError

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


WORDS = frozenset(
    {
        *("TOKEN", "SECRET", "KEY", "KEYS", "PASS", "PW", "PWD", "PAT", "AUTH", "AUTHORIZATION", "BEARER", "CRED"),
        *("CREDS", "COOKIE", "COOKIES", "JWT", "DSN", "SAS", "PRIVATE"),
    }
)
"""Words of a variable's name, between underscores."""

ENDINGS = ("TOKEN", "KEY", "PASS", "PWD", "AUTH", "CREDS")
HARMLESS = frozenset({"BYPASS", "COMPASS"})
PARTS = ("SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "APIKEY")
"""Of a word that was not cut by underscores, such as ``PGPASS`` and ``MYSQLPASSWORD``."""

_KEY = r"(?:[a-z_-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|signature|credential)|sig|pwd|auth)"
_VALUES = (
    ("an address with a password in it", re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#]*:[^\s/?#]*@", re.IGNORECASE)),
    ("a proxy with a password", re.compile(r"proxy=[^\s/:@]+:[^\s/@]+@", re.IGNORECASE)),
    (
        "an address with a key in it",
        re.compile(r"(?:hf_|gh[a-z]_|github_pat_|glpat-|x-access-token|oauth2)[^\s/@]*@", re.IGNORECASE),
    ),
    ("a secret with its name", re.compile(rf"(?:^|[?&;,\s]){_KEY}\s*[=:]\s*[^\s&]+", re.IGNORECASE)),
    ("a header that signs somebody in", re.compile(r"\b(?:bearer|basic)\s+[\w+/=.~-]{8,}", re.IGNORECASE)),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY")),
    (
        "a token of a known kind",
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
            r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
            r"|pypi-[\w-]{30,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
    ),
)


def secret_in(value: str) -> str:
    """The kind of secret that the value looks like; empty if none."""
    return next((f"looks like {kind}" for kind, pattern in _VALUES if pattern.search(value)), "")


def is_secret(name: str, value: str) -> bool:
    """Whether the variable's name suggests a secret; the path of an existing file is not one."""
    path = os.path.expanduser(value)  # noqa: PTH111  # Path's own raises for an unknown user
    if not value or (os.path.isabs(path) and os.path.exists(path)):  # noqa: PTH110, PTH117  # nor for what is no path
        return False
    words = set(name.upper().split("_")) - HARMLESS
    return any(word in WORDS or word.endswith(ENDINGS) or any(part in word for part in PARTS) for word in words)
