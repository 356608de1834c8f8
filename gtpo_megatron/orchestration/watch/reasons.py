"""What Ray says about the death of a process, in one line."""

import re

MAX_REASON_CHARACTERS = 400
"""Of what Ray says about a death: its guesses about lost processes go on for a paragraph."""

SAYS_NOTHING = (
    "The actor died unexpectedly before finishing this task",
    "The actor never ran",
    *(f"{field}:" for field in ("class_name", "actor_id", "pid", "name", "namespace", "ip")),
)
"""How lines of Ray's messages begin that say only that or where a process died."""


def last_line(message: str) -> str:
    """The last line of Ray's message that says why a process died; "" where none does.

    In a traceback that is the exception. It comes without colours, and cut where it is long.
    """
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()]
    telling = [line for line in lines if re.search(r"\w", line) and not line.startswith(SAYS_NOTHING)]
    line = telling[-1] if telling else ""
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS].rstrip()} ..."
