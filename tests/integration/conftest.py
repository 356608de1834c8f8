"""What every test of whole commands does."""

import pytest

from tests.integration.runs import STARTED


@pytest.fixture(autouse=True)
def _no_command_is_left():
    """A test that fails half-way leaves no driver behind, and a driver that is killed leaves no process."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
