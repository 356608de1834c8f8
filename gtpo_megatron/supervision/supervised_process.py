"""Starts a worker that runs a user's code, under its supervisor; forwards what it prints, and ends it."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.supervision.worker import END_PATIENCE_S

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the user's code; generous, because a cold file system is slow."""

EXIT_PATIENCE_S = 1.0
"""Time for a process to end after its pipe was closed, before it is killed."""

PRINTED_BYTES = 10_000
"""Limit of the output of one piece of work; the rest is dropped."""

_BOOTSTRAP = """\
import json, sys
from importlib import import_module
sys.path[:] = json.loads(sys.argv.pop(1))
told = json.loads(sys.argv[1])
from gtpo_megatron.supervision.worker import supervise
supervise(control=told["control"], connection=told["descriptor"], parent=told["parent"])
import_module(told["main"]).main()
"""
"""Sets the parent's module path in the child, so that it can import the same functions."""


class SupervisedProcess:
    """A worker under its supervisor: a new interpreter that ends with this process, with all that it starts.

    Args:
        main: module whose ``main()`` the worker runs; ``sys.argv[1]`` is JSON with what it is told.
        told: what the worker is told, beside ``descriptor``.
        descriptor: descriptor of the worker's end of a connection; the caller closes its own copy afterwards.
        what: name of what prints, for messages.

    Attributes:
        output: output of the worker.
    """

    def __init__(self, main: str, told: Mapping[str, Any], *, descriptor: int, what: str) -> None:
        control, self._control = os.pipe()
        output, printed = os.pipe()
        self.output = Output(output, what)
        self._what = what
        self._lock = threading.Lock()
        words = {**told, "main": main, "descriptor": descriptor, "control": control, "parent": os.getpid()}
        try:
            self._supervisor = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOTSTRAP),
                    *(json.dumps([str(entry) for entry in sys.path]), json.dumps(words)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=printed,  # the user's output must not mix with the caller's
                stderr=printed,
                pass_fds=[descriptor, control],
                process_group=0,  # Ctrl-C is for the parent
            )
        except BaseException:
            os.close(self._control)
            os.close(output)
            raise
        finally:
            os.close(control)
            os.close(printed)

    @property
    def supervisor_id(self) -> int:
        """Process id of the supervisor, whose child the worker is."""
        return self._supervisor.pid

    def end(self, patience_s: float = 0.0) -> int:
        """Ends it with its descendants, unless it ends itself within ``patience_s``; returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(patience_s)
        with self._lock:
            if self._control >= 0:
                os.close(self._control)  # the supervisor ends everything below it, then itself
                self._control = -1
                try:
                    self._supervisor.wait(2 * END_PATIENCE_S)
                except subprocess.TimeoutExpired:
                    logger.warning("the supervisor %d of %s does not answer", self._supervisor.pid, self._what)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._supervisor.pid, signal.SIGKILL)
                self.output.close()
        return self._supervisor.wait()


class Output:
    """Forwards the first bytes that a piece of work prints to our stderr, and drops the rest.

    Args:
        descriptor: the reading end of the worker's pipe; owned by this object.
        what: name of what prints, for messages.
    """

    def __init__(self, descriptor: int, what: str) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._what = what
        self._left = PRINTED_BYTES
        self._lock = threading.Lock()  # the worker may be ended while it works
        self._is_open = True

    def pass_on(self, *, is_new: bool = False) -> bool:
        """Reads available output, which belongs to the work before if a new one begins; False at its end."""
        with self._lock:
            goes_on = self._is_open and self._pass_on()
            self._left = PRINTED_BYTES if is_new else self._left
            return goes_on

    def _pass_on(self) -> bool:
        for _ in range(16):  # at most a megabyte, so that the wait for an answer continues
            try:
                text = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not text:
                return False
            if self._left > 0:
                _write_to_stderr(text[: self._left])
                if len(text) > self._left:
                    _write_to_stderr(f"\n[{self._what} printed more than {PRINTED_BYTES} bytes: cut]\n".encode())
            self._left -= len(text)
        return True

    def close(self) -> None:
        """Forwards the last output."""
        with self._lock:
            self._pass_on()
            self._is_open = False
            os.close(self.descriptor)


def _write_to_stderr(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a failed write must not lose an answer
        while text:
            text = text[os.write(2, text) :]
