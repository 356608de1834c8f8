"""The child's side of the reward pool: grades one row at a time until its parent goes away.

Started as a fresh interpreter, not by multiprocessing: neither a script without a ``__main__`` guard nor a Ray actor's
own main module is imported again.
"""

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO, cast

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.function import RewardFunction, graded, resolve_reward

ORPHAN_CHECK_S = 1.0
ALARM_GRACE_S = 5.0
"""The kernel ends an orphan that hangs in C code this long after its time limit; until then the parent does."""

PRINTED_CHARACTERS = 10_000
"""What a row may print; the rest is left out, so that a talkative reward does not fill the log."""

REASON_CHARACTERS = 500
"""Of an exception's text; some hold the whole response."""


def serve(connection: "Connection[Any, Any]", function: RewardFunction, *, timeout_s: float | None) -> None:
    """Answers ``(response, answer)`` with ``(kind, content)`` until the other end closes.

    Kinds: ``ok`` with the reward; ``error`` and ``memory`` with the reason why there is none.

    Args:
        connection: to the parent.
        function: the reward.
        timeout_s: the parent's time limit for a row; None arms no alarm.
    """
    while True:
        try:
            response, answer = connection.recv()
        except (EOFError, ConnectionError):
            return
        if timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)
        reply: tuple[str, float | str]
        try:
            reply = ("ok", graded(function, response, answer))
        except MemoryError:
            reply = ("memory", "MemoryError: the row needs more memory than its limit")
        except Exception as error:  # noqa: BLE001 - any failure of the user's function is that row's verdict
            reply = ("error", f"{type(error).__name__}: {_shortened(error)}")
        if timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(sys.stdout, CappedOutput):
            sys.stdout.begin_row()
        connection.send(reply)


class CappedOutput:
    """A text stream that passes on the first characters of each row."""

    def __init__(self, stream: TextIO, limit: int = PRINTED_CHARACTERS) -> None:
        self._stream = stream
        self._limit = limit
        self._left = limit

    def write(self, text: str) -> int:
        """Passes on what is left of the limit, and says so once where it is reached."""
        if self._left > 0:
            self._stream.write(text[: self._left])
            if len(text) > self._left:
                self._stream.write(f"\n[the reward function printed more than {self._limit} characters: cut]\n")
        self._left -= len(text)
        return len(text)

    def begin_row(self) -> None:
        """The limit starts anew."""
        self.flush()
        self._left = self._limit

    def flush(self) -> None:
        """Of the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Everything else (``encoding``, ``isatty``, ``fileno``) is the stream's."""
        return getattr(self._stream, name)


def main() -> None:
    """Entry point of the child; its one argument is JSON: descriptor, parent, function, limits."""
    told = json.loads(sys.argv[1])
    connection: Connection[Any, Any] = Connection(told["descriptor"])
    threading.Thread(target=_exit_with_parent, args=(told["parent"],), daemon=True).start()
    try:
        function = resolve_reward(told["function"])
    except ConfigError as error:
        connection.send(("unusable", str(error)))
        return
    sys.stdout = sys.stderr = cast("TextIO", CappedOutput(sys.stderr))
    if told["memory_limit_mib"]:
        limit_memory(told["memory_limit_mib"])
    connection.send(("ready", ""))
    serve(connection, function, timeout_s=told["timeout_s"])


def limit_memory(mib: int) -> None:
    """Bounds this process's own memory to what it has now and so much more; allocations past it raise MemoryError.

    Counts private writable memory (``RLIMIT_DATA``), not mapped files: libraries that map gigabytes do not matter.
    """
    now = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert now is not None
    limit = (int(now[1]) << 10) + (mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}..."


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone, also in the middle of a row."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
