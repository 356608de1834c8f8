"""The child's side of the reward pool: grades one row at a time until its parent goes away.

Started as a fresh interpreter, not by multiprocessing: neither a script without a ``__main__`` guard nor a Ray actor's
own main module is imported again.
"""

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.function import RewardFunction, graded, resolve_reward

ORPHAN_CHECK_S = 1.0
ALARM_GRACE_S = 5.0
"""The kernel ends an orphan that hangs in C code this long after its time limit; until then the parent does."""


def serve(connection: "Connection[Any, Any]", function: RewardFunction, *, timeout_s: float | None) -> None:
    """Answers ``(response, answer)`` with ``("ok", reward)`` or ``("error", reason)`` until the other end closes.

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
        except Exception as error:  # noqa: BLE001 - any failure of the user's function is that row's verdict
            reply = ("error", f"{type(error).__name__}: {error}")
        if timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


def main() -> None:
    """Entry point of the child; its one argument is JSON: descriptor, parent, function, time limit."""
    told = json.loads(sys.argv[1])
    connection: Connection[Any, Any] = Connection(told["descriptor"])
    threading.Thread(target=_exit_with_parent, args=(told["parent"],), daemon=True).start()
    try:
        function = resolve_reward(told["function"])
    except ConfigError as error:
        connection.send(("unusable", str(error)))
        return
    connection.send(("ready", ""))
    serve(connection, function, timeout_s=told["timeout_s"])


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent is gone, also in the middle of a row."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
