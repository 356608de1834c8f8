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


_FULL = re.compile(r"Memory on the node \(.*?\) was ([\d.]+)GB used / ([\d.]+)GB limit \(([\d.]+)\)")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_NAMES = {"ray::EngineProcess": "rollout engine", "ray::RankProcess": "rank", "ray::RewardProcess": "reward process"}
SHOWN_USERS, SHOWN_COMMAND = 3, 60
"""Processes that are named as those with most of the memory, and characters of their commands."""


def memory_kill(message: str) -> str:
    """How full the machine was and who had most of it, if Ray's memory monitor has ended a process; else ""."""
    full = _FULL.search(message)
    if full is None:
        return ""
    used, total, share = full.groups()
    users = [
        f"{_NAMES.get(command.partition('.')[0], command[:SHOWN_COMMAND].strip())} {gb} GB (process {pid})"
        for pid, gb, command in _USER.findall(message)[:SHOWN_USERS]
    ]
    most = f"; most of it had {', '.join(users)}" if users else ""
    return f"its machine's memory was {100 * float(share):.0f}% full ({used} of {total} GB), so Ray ended it{most}"


def last_line(message: str) -> str:
    """The last line of Ray's message that has the reason of a death; "" if there is none.

    In a traceback that is the exception, of Ray's memory monitor what ``memory_kill`` says. The result has no colours
    and at most ``MAX_REASON_CHARACTERS``.
    """
    if killed := memory_kill(message):
        return killed
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()]
    telling = [line for line in lines if re.search(r"\w", line) and not line.startswith(SAYS_NOTHING)]
    line = telling[-1] if telling else ""
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS].rstrip()} ..."
