"""The stand-ins change torch.cuda for the whole process, so these tests have a pytest of their own."""

import pytest

from tests.te_on_cpu import gpu_actor


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu_stack)
    item.add_marker(
        pytest.mark.skipif(not gpu_actor.FOLDER.exists(), reason="needs the gpu extra's versions: make test-gpu-stack")
    )
