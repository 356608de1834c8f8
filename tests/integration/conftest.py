"""What every test of whole commands does."""

import signal

import pytest

from tests.integration.runs import STARTED

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a script's background commands ignore Ctrl-C, and so would every command that a test starts and interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_command_is_left():
    """A test that fails half-way leaves no driver behind, and a driver that is killed leaves no process."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
