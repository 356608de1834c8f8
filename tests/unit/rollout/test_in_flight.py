"""Several batches in one engine, which works on all of them whoever asks."""

import math
from types import SimpleNamespace

import pytest

from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.in_flight import InFlight
from gtpo_megatron.rollout.requests import SampleRequest


class Engine:
    """Needs a given number of steps for each request."""

    def __init__(self, *steps):
        self.left = dict(enumerate(steps))
        self.num_steps = 0

    def has_unfinished_requests(self):
        return bool(self.left)

    def abort_request(self, numbers):
        self.aborted = numbers
        for number in numbers:
            del self.left[int(number)]

    def step(self):
        self.num_steps += 1
        outputs = []
        for number in list(self.left):
            self.left[number] -= 1
            is_finished = self.left[number] == 0
            outputs.append(SimpleNamespace(request_id=str(number), finished=is_finished, outputs=[f"text {number}"]))
            if is_finished:
                del self.left[number]
        return outputs


def requests(num):
    return [SampleRequest(prompt_ids=(1,), group_id=0, sample=sample) for sample in range(num)]


def test_all_move_on_together_and_each_batch_is_taken_alone():
    engine = Engine(1, 4, 2, 3)
    in_flight = InFlight(engine)
    first = in_flight.add(requests(2), 0, version=5)
    second = in_flight.add(requests(2), 2, version=5)
    found = [in_flight.advance(limit_s=0) for _ in range(4)]
    assert found == [[], [], [second], [first, second]]
    _, numbers, completions = in_flight.take(second)
    assert list(numbers) == [2, 3]
    assert completions == ["text 2", "text 3"]
    assert in_flight.advance(limit_s=math.inf) == [first]
    assert in_flight.take(first)[2] == ["text 0", "text 1"]
    assert in_flight.advance(limit_s=math.inf) == []
    assert engine.num_steps == 4


def test_an_aborted_batch_is_forgotten_and_the_others_go_on():
    engine = Engine(1, 9, 2)
    in_flight = InFlight(engine)
    slow = in_flight.add(requests(2), 0, version=5)
    other = in_flight.add(requests(1), 2, version=5)
    in_flight.advance(limit_s=0)
    assert list(in_flight.abort(slow)) == [0, 1]
    assert engine.aborted == ["1"]
    assert in_flight.advance(limit_s=math.inf) == [other]
    in_flight.take(other)
    in_flight.check_push(99, max_staleness=0)


def test_requests_that_vllm_lost_are_an_error():
    engine = Engine(1, 9)
    in_flight = InFlight(engine)
    in_flight.add(requests(2), 0, version=5)
    assert not in_flight.advance(limit_s=0)
    engine.left.clear()
    with pytest.raises(RolloutError, match="vLLM lost 1 requests: .* one of them is number 1"):
        in_flight.advance(limit_s=math.inf)


def test_weights_that_would_make_a_batch_too_old_are_refused():
    in_flight = InFlight(Engine(1))
    in_flight.check_push(9, max_staleness=0)
    in_flight.add(requests(1), 0, version=5)
    in_flight.check_push(5, max_staleness=0)  # the same weights again, for an engine that was replaced
    in_flight.check_push(6, max_staleness=1)
    with pytest.raises(WeightSyncError, match=r"version 7 is pushed while 1 requests .* begun with version 5; .*=1"):
        in_flight.check_push(7, max_staleness=1)


def test_a_batch_has_the_name_that_it_was_given():
    engine = Engine(1, 3)
    in_flight = InFlight(engine)
    assert in_flight.add(requests(1), 0, version=5, ticket=("group", 7)) == ("group", 7)
    in_flight.add(requests(1), 1, version=5, ticket=("group", 8))
    assert in_flight.advance(limit_s=0) == [("group", 7)]
    assert in_flight.take(("group", 7))[2] == ["text 0"]
    in_flight.abort(("group", 8))
    assert engine.aborted == ["1"]
