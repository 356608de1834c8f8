"""An endpoint without workers, and an episode of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gtpo_megatron.conversations.chat_endpoint import ChatEndpoint


@pytest.fixture(scope="module")
def endpoint():
    one = ChatEndpoint()
    yield one
    one.shutdown()
    one.server_close()


@pytest.fixture
def exchange(endpoint):
    one = endpoint.open()
    yield one
    endpoint.forget(one)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool
