"""The stand-ins change torch.cuda for the whole process, so these tests have a pytest of their own."""

import sys

import pytest

from tests.dist_utils import run_processes
from tests.te_on_cpu import gpu_actor


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu_stack)
    item.add_marker(
        pytest.mark.skipif(not gpu_actor.FOLDER.exists(), reason="needs the gpu extra's versions: make test-gpu-stack")
    )


@pytest.fixture(scope="session", autouse=True)
def ranks_are_prepared():
    """What cannot be imported into the process that ranks are forked of is left out there without a word."""
    [is_installed] = run_processes(lambda *_: "tests.te_on_cpu.installed" in sys.modules, 1)
    assert is_installed, "run pytest from the root of the repository"
