"""Passes requests to stop on to a run that this process has started in a session of its own.

No terminal, ``timeout`` or supervisor reaches such a run. What comes to this process instead is the run's to answer: it
saves itself, or ends at once at a second request (docs/reliability.md), while this process waits for its end.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

import psutil

from gtpo_megatron.run_folder.stop_request import STOP_SIGNALS


class PassedSignals:
    """Within the block, signals go to the run. Ignored ones stay ignored, by the run as well.

    Attributes:
        first: the first one that came; None so far.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._runs: list[psutil.Process] = []
        self._early: list[int] = []
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "PassedSignals":
        for number in STOP_SIGNALS:
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def run_has_started(self) -> None:
        """Finds the run, a child with a session of its own, and passes on what came before."""
        children = psutil.Process().children()
        self._runs = [child for child in children if os.getsid(child.pid) == child.pid]
        for number in self._early:
            self._pass_on(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.first = self.first or signal.Signals(number)
        if self._runs:
            self._pass_on(number)
        else:
            self._early.append(number)

    def _pass_on(self, number: int) -> None:
        """To the driver alone, which is who its whole process group would hear it by."""
        for run in self._runs:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                run.send_signal(number)
