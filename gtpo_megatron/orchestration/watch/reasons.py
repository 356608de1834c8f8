"""The reason of a process's death by Ray, in one line."""

import re

MAX_REASON_CHARACTERS = 400
"""Length to which reasons are cut."""

SAYS_NOTHING = (
    "The actor died unexpectedly before finishing this task",
    "The actor never ran",
    *(f"{field}:" for field in ("class_name", "actor_id", "pid", "name", "namespace", "ip")),
)
"""Starts of lines of Ray's messages that do not contain the reason."""


def last_line(message: str) -> str:
    """The last line of Ray's message that has the reason of a death; "" if there is none.

    In a traceback that is the exception. The result has no colours and at most ``MAX_REASON_CHARACTERS``.
    """
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()]
    telling = [line for line in lines if re.search(r"\w", line) and not line.startswith(SAYS_NOTHING)]
    line = telling[-1] if telling else ""
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS].rstrip()} ..."
