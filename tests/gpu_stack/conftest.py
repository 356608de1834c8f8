"""The stand-ins change torch.cuda for the whole process, so these tests have a pytest of their own."""

import warnings

import pytest

from tests.te_on_cpu import gpu_actor


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu_stack)
    item.add_marker(
        pytest.mark.skipif(not gpu_actor.FOLDER.exists(), reason="needs the gpu extra's versions: make test-gpu-stack")
    )


@pytest.fixture(scope="session")
def te_actor():
    """Imports Transformer Engine and Megatron once in the parent, so that forked ranks start in milliseconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gpu_actor.install()
