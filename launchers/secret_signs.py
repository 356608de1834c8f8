"""Heuristics that recognise secrets by name and value; they may refuse harmless values."""

import os
import re

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
