"""Several batches in one engine, which works on all of them whoever asks."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest

from gtpo_megatron.batch import EpisodeResult
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.in_flight import InFlight, TurnAnswer
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.responses import to_rollout_batch


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


class Begins:
    """``InFlight.begin`` with vLLM's numbers in order; keeps what each turn was to go on from."""

    def __init__(self, in_flight):
        self.in_flight = in_flight
        self.turns = []

    def __call__(self, num, *, version=5, limit=99, ticket=None):
        return self.in_flight.begin(requests(num), self._add, version=version, limit=limit, ticket=ticket)

    def _add(self, request, tokens, turn, num_sampled, stop):
        self.turns.append((request.sample, tuple(tokens), turn, num_sampled))
        return len(self.turns) - 1


def texts(episodes):
    return [episode.turns[-1].completion for episode in episodes]


def test_all_move_on_together_and_each_batch_is_taken_alone():
    engine = Engine(1, 4, 2, 3)
    in_flight = InFlight(engine)
    begin = Begins(in_flight)
    first, second = begin(2), begin(2)
    found = [in_flight.advance(limit_s=0) for _ in range(4)]
    assert found == [[], [], [second], [first, second]]
    taken = in_flight.take(second)
    assert [episode.turns[0].number for episode in taken] == [2, 3]
    assert texts(taken) == ["text 2", "text 3"]
    assert in_flight.advance(limit_s=math.inf) == [first]
    assert texts(in_flight.take(first)) == ["text 0", "text 1"]
    assert in_flight.advance(limit_s=math.inf) == []
    assert engine.num_steps == 4


def test_an_aborted_batch_is_forgotten_and_the_others_go_on():
    engine = Engine(1, 9, 2)
    in_flight = InFlight(engine)
    begin = Begins(in_flight)
    slow, other = begin(2), begin(1)
    in_flight.advance(limit_s=0)
    assert in_flight.abort(slow) == [0, 1]
    assert engine.aborted == ["1"]
    assert in_flight.advance(limit_s=math.inf) == [other]
    in_flight.take(other)
    in_flight.check_push(99, max_staleness=0)


def test_requests_that_vllm_lost_are_an_error():
    engine = Engine(1, 9)
    in_flight = InFlight(engine)
    Begins(in_flight)(2)
    assert not in_flight.advance(limit_s=0)
    engine.left.clear()
    with pytest.raises(RolloutError, match="vLLM lost 1 requests: .* one of them is number 1"):
        in_flight.advance(limit_s=math.inf)


def test_weights_that_would_make_a_batch_too_old_are_refused():
    in_flight = InFlight(Engine(1))
    in_flight.check_push(9, max_staleness=0)
    Begins(in_flight)(1)
    in_flight.check_push(5, max_staleness=0)  # the same weights again, for an engine that was replaced
    in_flight.check_push(6, max_staleness=1)
    with pytest.raises(WeightSyncError, match=r"version 7 is pushed while 1 requests .* begun with version 5; .*=1"):
        in_flight.check_push(7, max_staleness=1)


def test_a_batch_has_the_name_that_it_was_given():
    engine = Engine(1, 3)
    in_flight = InFlight(engine)
    begin = Begins(in_flight)
    assert begin(1, ticket=("group", 7)) == ("group", 7)
    begin(1, ticket=("group", 8))
    assert in_flight.advance(limit_s=0) == [("group", 7)]
    assert texts(in_flight.take(("group", 7))) == ["text 0"]
    in_flight.abort(("group", 8))
    assert engine.aborted == ["1"]


class TurnEngine:
    """Ends every request in one step, with the tokens 100 + its number; ``endless`` ones at no time."""

    def __init__(self, *, endless=()):
        self.running = {}
        self.stops = {}
        self.endless = set(endless)
        self.steps = []

    def add(self, request, tokens, turn, num_sampled, stop):
        number = len(self.running) + sum(len(ended) for ended in self.steps)
        self.stops[number] = stop
        self.running[number] = (request.sample, tuple(tokens), turn, num_sampled)
        return number

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, numbers):
        for number in numbers:
            del self.running[int(number)]

    def step(self):
        ended = {number: row for number, row in self.running.items() if number not in self.endless}
        self.steps.append(ended)
        self.running = {number: row for number, row in self.running.items() if number in self.endless}
        return [
            SimpleNamespace(
                request_id=str(number),
                finished=True,
                outputs=[
                    SimpleNamespace(
                        token_ids=[100 + number],
                        finish_reason="stop",
                        logprobs=SimpleNamespace(token_ids=[100 + number], logprobs=[-float(number)]),
                        weight_versions=[SimpleNamespace(version="5", start=0, end=1)],
                    )
                ],
            )
            for number in ended
        ]


class Script:
    """An environment whose answers are given by sample: token ids, None for the end, or fields of a `TurnAnswer`;
    ``late`` ones take a look.

    Those of ``graded`` say their reward when a limit has ended them.
    """

    def __init__(self, *answers, in_rounds=True, late=(), stops=(), limit_s=math.inf, graded=()):
        self.limit_s, self.max_prompt_tokens = limit_s, 4
        self._graded = graded
        self.asked = []
        self._stops = list(stops)
        self.in_rounds = in_rounds
        self._answers = [list(row) for row in answers]
        self._samples = {}
        self._ready = {}
        self._late = {sample: {} for sample in late}
        self.forgotten = []
        self.opened = []

    def open(self, episode, request, *, stop_ids):
        self.opened.append((episode, stop_ids))
        self._samples[episode] = request.sample
        self._say(episode)

    def turn_ended(self, episode, completion, *, is_asked=True):
        self.asked.append(is_asked)
        if is_asked:
            self._say(episode)

    def cut(self, episode):
        if is_graded := self._samples[episode] in self._graded:
            self._ready[episode] = TurnAnswer(context_ids=None, result=EpisodeResult(reward=0.5))
        return is_graded

    def late(self, episode):
        self.ended = self._samples[episode]
        return TurnAnswer(context_ids=None, result=EpisodeResult(failure="too long"))

    def _say(self, episode):
        sample = self._samples[episode]
        context = self._answers[sample].pop(0)
        more = {}
        if isinstance(context, dict):
            context, more = (), context
        answer = TurnAnswer(**{"context_ids": context, "result": EpisodeResult(reward=float(sample)), **more})
        if self._stops:
            answer = dataclasses.replace(answer, stop=self._stops.pop(0))
        self._late.get(sample, self._ready)[episode] = answer

    def answers(self, *, within_s):
        found, self._ready = self._ready, {}
        for late in self._late.values():
            self._ready |= late
            late.clear()
        return found

    def forget(self, episode):
        self.forgotten.append(self._samples[episode])


def played(script, engine=None, *, num=2, limit=99):
    engine = engine or TurnEngine()
    in_flight = InFlight(engine, script)
    ticket = in_flight.begin(requests(num), engine.add, version=5, limit=limit)
    assert in_flight.advance(limit_s=math.inf) == [ticket]
    return engine, in_flight.take(ticket)


def whole(episode):
    """All tokens of an episode without branches."""
    return episode.sequence(len(episode.turns) - 1 if episode.turns else None)


def test_a_turn_goes_on_from_all_tokens_before_it():
    engine, (first, second) = played(Script([(7, 8), (9,), None], [(6,), None]))
    assert engine.steps == [{0: (0, (7, 8), 0, 0), 1: (1, (6,), 0, 0)}, {2: (0, (7, 8, 100, 9), 1, 2)}]
    assert (first.prompt_ids, first.sequence(1)) == ((7, 8), [7, 8, 100, 9, 102])
    assert (second.prompt_ids, second.sequence(0)) == ((6,), [6, 101])
    assert (first.result.reward, second.result.reward) == (0.0, 1.0)
    assert [first.is_cut, second.is_cut] == [False, False]


FRESH = {"context_ids": (1, 2, 3, 4, 5), "is_fresh": True}
AGAIN, ON = ({"is_again": True, "after": number} for number in (0, 1)), {"context_ids": (9,), "after": 0}


def test_turns_go_on_from_any_turn():
    """``0``; after it ``1``; another after 0; one in the place of 0, one in the place of 1; a fresh one, and on."""
    again, again_later = AGAIN
    answers = [(7, 8), (6,), ON, again, again_later, FRESH, (3,), {"is_again": True, "after": 5}, None]
    engine, (episode,) = played(Script(answers), num=1)
    assert [step for steps in engine.steps for step in steps.values()] == [
        (0, (7, 8), 0, 0),
        (0, (7, 8, 100, 6), 1, 2),
        (0, (7, 8, 100, 9), 2, 2),
        (0, (7, 8), 3, 0),
        (0, (7, 8, 100, 6), 4, 2),
        (0, (1, 2, 3, 4, 5), 5, 1),  # a token more than prompts have
        (0, (1, 2, 3, 4, 5, 105, 3), 6, 3),
        (0, (1, 2, 3, 4, 5), 7, 1),
    ]
    batch = to_rollout_batch([episode], version=5, entropies=None)
    assert batch.branches == (
        ((3, 1), (5, 0), (6, 2), (7, -1), (15, 12)),  # the response is 100 6 101 9 102 103 104 1..5 105 3 106 107
    )
    assert batch.response_ids.tolist() == [[100, 6, 101, 9, 102, 103, 104, 1, 2, 3, 4, 5, 105, 3, 106, 107]]
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [0, 2, 4, 5, 6, 12, 14, 15]
    assert batch.rollout_logprobs[batch.loss_mask].tolist() == [-float(number) for number in range(8)]


@pytest.mark.parametrize("seed", range(20))
def test_a_row_has_what_the_engine_was_given(seed):
    draw = random.Random(seed)
    answers = [(7, 8)]
    for number in range(1, 9):
        kind = draw.choice(["on", "again", "fresh"])
        after = draw.randrange(number)
        answers.append(
            {
                "on": {"context_ids": tuple(range(10 * number, 10 * number + draw.randint(1, 3))), "after": after},
                "again": {"is_again": True, "after": after},
                "fresh": {"context_ids": tuple(range(10 * number, 10 * number + 3)), "is_fresh": True},
            }[kind]
        )
    engine, (episode,) = played(Script([*answers, None]), num=1)
    given = [[*tokens, 100 + number] for steps in engine.steps for number, (_, tokens, _, _) in sorted(steps.items())]
    batch = to_rollout_batch([episode], version=5, entropies=None)
    found = []
    for path in batch.paths(0):
        ids = [int(batch.response_ids[0, place]) for first, last in path.stretches for place in range(first, last)]
        found.append([*((7, 8) if path.has_prompt else ()), *ids])
    assert all(any(path[: len(one)] == one for path in found) for one in given)
    assert all(path in given for path in found)
    assert batch.loss_mask.sum() == 9


def test_an_answer_says_which_texts_end_the_next_turn():
    engine, _ = played(Script([(7, 8), (9,), (6,), None], stops=[("a",), (), ("b", "c")]), num=1)
    assert engine.stops == {0: ("a",), 1: (), 2: ("b", "c")}


def test_an_episode_is_told_what_ends_the_turns_of_its_batch():
    script = Script([None], [None])
    in_flight = InFlight(TurnEngine(), script)
    in_flight.begin(requests(1), TurnEngine().add, version=5, limit=9, stop_ids=(2,))
    in_flight.begin(requests(2)[1:], TurnEngine().add, version=5, limit=9, stop_ids=(2, 7))
    assert script.opened == [(0, (2,)), (1, (2, 7))]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_rounds_do_not_depend_on_when_an_answer_comes(in_rounds):
    answers = [[(7,), (9,), None], [(6,), (5,), None]]
    steps = [
        [sorted(step) for step in played(Script(*answers, in_rounds=in_rounds, late=late))[0].steps]
        for late in ((), (0,), (1,))
    ]
    assert (steps[0] == steps[1] == steps[2]) == in_rounds


@pytest.mark.parametrize(("in_rounds", "waits"), [(True, [6.0, 9.0]), (False, [6.0, 9.0])])
def test_seconds_in_which_nothing_is_sampled_are_those_of_the_episodes_that_live_through_them(
    monkeypatch, in_rounds, waits
):
    """Every look at the environments takes 3 s; while turns are sampled, a look costs nothing that is not theirs."""
    script, clock = Script([(7,), None], [(6,), (5,), None], in_rounds=in_rounds), [0.0]
    look = script.answers

    def slow(*, within_s):
        clock[0] += 3.0
        return look(within_s=within_s)

    script.answers = slow
    monkeypatch.setattr("gtpo_megatron.rollout.in_flight.time.monotonic", lambda: clock[0])
    engine = TurnEngine()
    in_flight = InFlight(engine, script)
    earlier = in_flight.begin(requests(2), engine.add, version=5, limit=99)
    in_flight.advance(limit_s=math.inf)
    assert [episode.idle_s for episode in in_flight.take(earlier)] == waits
    assert in_flight._idle_s == 9.0


def test_an_answer_that_does_not_fit_ends_the_episode():
    script = Script([(7,), (9, 9), (9,), None], [(6,), None])
    _, (first, second) = played(script, limit=5)
    assert (whole(first), first.is_cut) == ([7, 100, 9, 9, 102], True)  # one more, and there is no token for a turn
    assert not second.is_cut
    assert sorted(script.forgotten) == [0, 1]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_an_episode_that_the_length_ends_is_asked_for_its_reward_where_it_can_be(in_rounds):
    script = Script([(7,), (9, 9, 9, 9), None], [(6,), (5, 5, 5, 5)], in_rounds=in_rounds, graded=[1])
    _, (first, second) = played(script, limit=5)
    assert [(one.is_cut, one.result.reward, len(one.turns)) for one in (first, second)] == [
        (True, 0.0, 1),
        (True, 0.5, 1),
    ]


@pytest.fixture
def clock(monkeypatch):
    """Goes on by what a test adds, and a second per look at the environments."""
    now = [0.0]
    monkeypatch.setattr("gtpo_megatron.rollout.in_flight.time.monotonic", lambda: now[0])
    look = Script.answers

    def slow(script, *, within_s):
        now[0] += 1.0
        return look(script, within_s=within_s)

    monkeypatch.setattr(Script, "answers", slow)
    return now


@pytest.mark.parametrize("in_rounds", [True, False])
def test_an_episode_whose_environment_takes_too_long_fails_alone(clock, in_rounds):
    """What the others of its round wait for it is not their time."""
    script = Script([(7,), (9,), None], [(6,), (5,), (5,), None], in_rounds=in_rounds, limit_s=6.0)
    turn_ended, asked = script.turn_ended, []

    def hangs(key, turn, **given):
        if script._samples[key] == 0:
            asked.append(key)  # and no answer comes
        else:
            turn_ended(key, turn, **given)

    script.turn_ended = hangs
    _, (first, second) = played(script)
    assert (first.result.failure, whole(first), asked) == ("too long", [7, 100], [0])
    assert (second.result.failure, len(second.turns), second.is_cut) == ("", 3, False)
    assert second.own_s <= 6.0 < clock[0]
    assert sorted(script.forgotten) == [0, 1]


@pytest.mark.parametrize(("graded", "failure", "reward"), [([], "too long", 0.0), ([0], "", 0.5)])
@pytest.mark.parametrize("when", ["sampled", "answered"])
def test_an_episode_out_of_time_is_asked_for_its_reward_between_calls(clock, when, graded, failure, reward):
    """A turn that is sampled is not broken off, and its environment does not get it any more."""
    script = Script([(7,), (9,), None], limit_s=5.0, graded=graded)
    engine = TurnEngine()
    step, look = engine.step, script.answers

    def slow_step():
        clock[0] += 9.0 * (when == "sampled")
        return step()

    def slow_answers(*, within_s):
        clock[0] += 9.0 * (when == "answered" and bool(engine.steps))
        return look(within_s=within_s)

    engine.step, script.answers = slow_step, slow_answers
    _, (only,) = played(script, engine, num=1)
    assert (only.result.failure, only.result.reward, whole(only)) == (failure, reward, [7, 100])
    assert only.is_cut
    assert script.asked == [when == "answered"]


def test_an_episode_that_could_not_begin_has_no_turn():
    _, (first, second) = played(Script([None], [(6,), None]))
    assert (first.turns, first.prompt_ids, whole(first)) == ([], (1,), [])
    assert whole(second) == [6, 100]


def test_others_are_sampled_while_an_environment_thinks():
    script = Script([(7,), (9,), None], [(6,), None], in_rounds=False, late=(0,))
    engine, _ = played(script)
    assert [sorted(step) for step in engine.steps] == [[0], [1], [2]]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_an_environment_that_ends_while_a_turn_is_sampled_ends_the_episode_after_it(in_rounds):
    script = Script([(7,)], [(6,), (5,), None], in_rounds=in_rounds)
    engine = TurnEngine()
    in_flight = InFlight(engine, script)
    ticket = in_flight.begin(requests(2), engine.add, version=5, limit=9)
    add = script.turn_ended
    script.turn_ended = lambda key, turn, **given: None if script._samples[key] == 0 else add(key, turn, **given)
    in_flight.advance(limit_s=0)  # both turns begin
    script._ready[0] = TurnAnswer(context_ids=None, result=EpisodeResult(failure="its process ended"))
    assert in_flight.advance(limit_s=math.inf) == [ticket]
    first, second = in_flight.take(ticket)
    assert (whole(first), first.result.failure) == ([7, 100], "its process ended")
    assert whole(second) == [6, 101, 5, 102]


def test_an_aborted_episode_is_forgotten_whatever_it_waits_for():
    script = Script([(7,), None], [(6,), None], [(6,), None], in_rounds=False, late=(1,))
    engine = TurnEngine(endless=[0])
    in_flight = InFlight(engine, script)
    ticket = in_flight.begin(requests(2), engine.add, version=5, limit=9)
    in_flight.advance(limit_s=0)
    assert in_flight.abort(ticket) == [0]
    assert sorted(script.forgotten) == [0, 1]
    assert in_flight.advance(limit_s=math.inf) == []
    assert not engine.running
