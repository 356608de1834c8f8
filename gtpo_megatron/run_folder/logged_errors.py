"""The errors in ``log.txt`` since the last start, and the message of a failure that refers to them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gtpo_megatron.errors import GTPOError
from gtpo_megatron.run_folder.provenance import LOG_FILE

LOG_TAIL_BYTES = 1 << 20
QUOTED_CHARACTERS = 400
"""Of a line of the log, in another message."""

_ERROR = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (?:ERROR|CRITICAL) +(.*)$")
_START = re.compile(r" gtpo_megatron\.run_folder\.provenance: versions: ")


def logged_errors(path: Path) -> list[str]:
    """Error lines of the log since the last start; of a long log only the end is read."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if _START.search(line)]
    since = lines[starts[-1] :] if starts else lines
    return [found.group(1).strip() for line in since if (found := _ERROR.match(line))]


@contextmanager
def logged_cause(path: Path) -> Iterator[None]:
    """An error of this block that refers to ``log.txt`` also quotes the last error there.

    Raises:
        GTPOError: of the same class, with the longer message.
    """
    try:
        yield
    except GTPOError as error:
        errors = logged_errors(path) if LOG_FILE in str(error) else []
        if not errors:
            raise
        last = errors[-1]
        quoted = last if len(last) <= QUOTED_CHARACTERS else f"{last[:QUOTED_CHARACTERS]}..."
        raise type(error)(f"{error}; its last error: {quoted}") from error
