"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it holds is cleaned up, and it says what it leaves."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gtpo_megatron.run_folder.stop_request import SHELL_OFFSET, Requests, interrupt, named_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_heard: list[signal.Signals] = []
"""Signals that have interrupted since the handlers were set: Ray raises a KeyboardInterrupt of its own in place of one
that comes inside its calls, which does not say by which."""


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Within the block signals interrupt; see ``interrupt_on_signals``."""
    before = interrupt_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_on_signals() -> dict[signal.Signals, Any]:
    """From now on these signals raise KeyboardInterrupt, which says which one it was; ignored ones stay ignored.

    Signals that belong to one request raise once, so that they do not interrupt the cleaning up. Does nothing outside
    the main thread, where no signal arrives.

    Returns:
        The handlers that were replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    requests = Requests()
    _heard.clear()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        if requests.is_new():
            _heard.append(signal.Signals(number))
            raise interrupt(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, on_signal)
    return replaced


def interrupted_by(error: KeyboardInterrupt) -> signal.Signals:
    """The signal that raised it."""
    named = named_signal(error)
    return named if named is not None else _heard[-1] if _heard else signal.SIGINT


def interruption(error: KeyboardInterrupt) -> str:
    """What a command says of it: ``interrupted`` for Ctrl-C, else with the signal's name."""
    number = interrupted_by(error)
    return "interrupted" if number is signal.SIGINT else f"interrupted by {number.name}"


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a command that it ended, as a shell counts: 130 after Ctrl-C, 143 after SIGTERM."""
    return SHELL_OFFSET + interrupted_by(error)
