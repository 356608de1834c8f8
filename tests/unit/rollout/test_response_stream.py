"""The window of requests that keeps vLLM busy, over an engine that is none."""

from types import SimpleNamespace

import pytest

from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.response_stream import SampledResponse, stream_responses


class Engine:
    """Ends the youngest request first, one a step."""

    def __init__(self, first=7):
        self.next = first
        self.inside, self.most, self.aborted = [], 0, []
        self.tokens = [5]

    def add(self, request):
        number, self.next = self.next, self.next + 1
        self.inside.append((str(number), request))
        self.most = max(self.most, len(self.inside))
        return number

    def has_unfinished_requests(self):
        return bool(self.inside)

    def step(self):
        number, request = self.inside.pop()
        reason = "length" if request.sample else "stop"
        completion = SimpleNamespace(token_ids=[*self.tokens, *request.prompt_ids], finish_reason=reason)
        unfinished = [SimpleNamespace(finished=False, request_id=n) for n, _ in self.inside]
        return [*unfinished, SimpleNamespace(finished=True, request_id=number, outputs=[completion])]

    def abort_request(self, numbers):
        self.aborted = numbers


def requests(num):
    return [SampleRequest(prompt_ids=(i,), group_id=i, sample=i % 2) for i in range(num)]


def test_every_request_comes_back_once_with_its_own_response():
    engine = Engine()
    found = list(stream_responses(engine, engine.add, requests(9), max_concurrent=2))
    assert sorted(response.index for response in found) == list(range(9))
    assert [response.index for response in found] != list(range(9)), "in the order in which they end"
    assert all(
        r == SampledResponse(index=r.index, token_ids=(5, r.index), is_truncated=bool(r.index % 2)) for r in found
    )
    assert engine.most == 4, "twice what is decoded together, and no more"
    assert engine.aborted == []


def test_closing_early_gives_up_what_is_being_written():
    engine = Engine()
    stream = stream_responses(engine, engine.add, requests(9), max_concurrent=2)
    next(stream)
    stream.close()
    assert sorted(engine.aborted) == [number for number, _ in engine.inside]
    assert len(engine.aborted) == 3


def test_a_response_without_a_token_and_a_lost_request_are_errors():
    engine = Engine()
    engine.tokens = []
    empty = [SampleRequest(prompt_ids=(), group_id=0, sample=0)]
    with pytest.raises(RolloutError, match="request 0 ended without a token: finish reason 'stop'"):
        list(stream_responses(engine, engine.add, empty, max_concurrent=2))
    lost = Engine()
    lost.has_unfinished_requests = lambda: False
    with pytest.raises(RolloutError, match="lost 2 requests"):
        list(stream_responses(lost, lost.add, requests(2), max_concurrent=2))
