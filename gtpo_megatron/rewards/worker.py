"""The child's side of the reward pool: grades one row at a time until its parent goes away.

Started as a fresh interpreter, not by multiprocessing: neither a script without a ``__main__`` guard nor a Ray actor's
own main module is imported again.
"""

import contextlib
import json
import os
import re
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.function import RewardFunction, graded, resolve_reward

OUT_OF_MEMORY = "MemoryError: the row needs more memory than its limit"

REASON_CHARACTERS = 500
"""Of an exception's text; some hold the whole response."""


def serve(connection: "Connection[Any, Any]", function: RewardFunction) -> None:
    """Answers ``(response, answer)`` with ``(kind, content)`` until the other end closes.

    Kinds: ``ok`` with the reward; ``error`` and ``memory`` with the reason why there is none.

    Args:
        connection: to the parent.
        function: the reward.
    """
    while True:
        try:
            response, answer = connection.recv()
        except (EOFError, ConnectionError):
            return
        reply: tuple[str, float | str]
        try:
            reply = ("ok", graded(function, response, answer))
        except MemoryError:
            reply = ("memory", OUT_OF_MEMORY)
        except Exception as error:  # noqa: BLE001 - any failure of the user's function is that row's verdict
            reply = ("error", f"{type(error).__name__}: {_shortened(error)}")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function may have closed them
                stream.flush()  # what it printed belongs to this row
        connection.send(reply)


def main() -> None:
    """Entry point of the child; its one argument is JSON: descriptors, parent, function, limit."""
    told = json.loads(sys.argv[1])
    connection: Connection[Any, Any] = Connection(told["descriptor"])
    try:
        function = resolve_reward(told["function"])
    except ConfigError as error:
        connection.send(("unusable", str(error)))
        return
    if told["memory_limit_mib"]:
        limit_memory(told["memory_limit_mib"])
    connection.send(("ready", os.getpid()))
    serve(connection, function)


def limit_memory(mib: int) -> None:
    """Bounds this process's own memory to what it has now and so much more; allocations past it raise MemoryError.

    Counts private writable memory (``RLIMIT_DATA``), not mapped files: libraries that map gigabytes do not matter. What
    is shared, and what processes that it starts take, is watched by the pool.
    """
    now = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert now is not None
    limit = (int(now[1]) << 10) + (mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}..."
