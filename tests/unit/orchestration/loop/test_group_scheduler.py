"""The scheduler of groups: its bounds, and its account over random runs with deaths, aborts and dropped prompts."""

import math
import random
from collections import Counter

import pytest

from gtpo_megatron.orchestration.loop.group_scheduler import GroupScheduler, SchedulerRules
from gtpo_megatron.orchestration.stages.engines import Attempt


def scheduler(num_engines=2, **rules):
    defaults = {
        **{"groups_per_step": 4, "group_size": 2, "max_staleness": 1, "over_sample": 2.0, "stragglers": "wait"},
        **{"max_concurrent": 64, "num_steps": 100},
    }
    return GroupScheduler(SchedulerRules(**defaults | rules), num_engines=num_engines)


class Prompts:
    """Draws labels in order, as a run does."""

    def __init__(self, found):
        self.scheduler, self.next = found, 0

    def top_up(self):
        num = self.scheduler.num_wanted()
        self.scheduler.add(range(self.next, self.next + num))
        self.next += num
        return num


def finish(found, attempts, *, version=None):
    for attempt in attempts:
        assert found.sampled(attempt, found.version if version is None else version)
        assert found.graded(attempt, is_kept=True)


def test_as_many_prompts_are_under_way_as_the_bound_allows():
    found = scheduler(max_staleness=4, over_sample=2.5)
    prompts = Prompts(found)
    assert prompts.top_up() == 10  # 2.5 x 4
    assert prompts.top_up() == 0
    finish(found, found.dispatch(0) + found.dispatch(1))
    assert found.take(1) == [0, 1, 2, 3]
    assert prompts.top_up() == 0, "before the push what is drawn would be of old weights"
    found.pushed(1)
    assert prompts.top_up() == 4
    assert found.account().under_way == 10


def test_nothing_is_begun_that_no_step_could_train():
    """With bound 0, between a step's beginning and its push."""
    found = scheduler(max_staleness=0, over_sample=1.5, stragglers="abort")
    prompts = Prompts(found)
    prompts.top_up()
    begun = found.dispatch(0) + found.dispatch(1)
    assert len(begun) == 6
    finish(found, begun[:4])
    assert found.is_ready(1)
    assert len(found.take(1)) == 4
    # the two that were not whole are aborted, and come first with the next weights
    aborted = found.to_abort(0) + found.to_abort(1)
    assert sorted(aborted) == sorted(begun[4:])
    assert found.events == Counter(aborted=2)
    assert found.dispatch(0) == []
    found.pushed(1)
    prompts.top_up()
    again = found.dispatch(0) + found.dispatch(1)
    assert again[:2] == [Attempt(attempt.group, 1) for attempt in sorted(begun[4:])]


def test_a_group_that_always_ends_last_is_trained_at_its_third_try():
    found = scheduler(num_engines=1, max_staleness=0, over_sample=1.5, stragglers="abort", num_steps=9)
    prompts, tries = Prompts(found), []
    for step in (1, 2, 3):
        prompts.top_up()
        begun = found.dispatch(0)
        tries += [attempt for attempt in begun if attempt.group == 0]
        finish(found, [attempt for attempt in begun if attempt.group != 0], version=step - 1)
        assert found.is_ready(step) is (step < 3)
        if step < 3:
            assert 0 not in found.take(step)
            assert found.to_abort(0) == [Attempt(0, step - 1)]
            found.pushed(step)
    assert tries == [Attempt(0, number) for number in range(3)]
    finish(found, tries[-1:], version=2)
    assert 0 in found.take(3)


def test_engines_get_equal_shares_and_no_more_than_they_decode_together():
    found = scheduler(num_engines=3, groups_per_step=30, max_concurrent=8, over_sample=1.0)
    Prompts(found).top_up()
    sizes = [len(found.dispatch(engine)) for engine in range(3)]
    assert sizes == [5, 5, 5]  # 4 groups of 2 decode together, one waits
    found = scheduler(num_engines=3, groups_per_step=7, over_sample=1.0)
    Prompts(found).top_up()
    assert [len(found.dispatch(engine)) for engine in range(3)] == [3, 3, 1]


@pytest.mark.parametrize(("stragglers", "is_ready"), [("wait", False), ("abort", True)])
def test_a_group_that_would_be_too_old_for_the_next_step(stragglers, is_ready):
    """Bound 1: a group of version 0 is for step 2 at the latest."""
    found = scheduler(num_engines=1, stragglers=stragglers)
    prompts = Prompts(found)
    prompts.top_up()
    begun = found.dispatch(0)
    assert len(begun) == 8
    finish(found, begun[:4])
    assert found.is_ready(1)
    assert found.take(1) == [0, 1, 2, 3]
    found.pushed(1)
    prompts.top_up()
    newer = found.dispatch(0)
    finish(found, [*begun[4:7], *newer])
    assert found.is_ready(2) is is_ready
    if is_ready:
        assert found.take(2) == [4, 5, 6, 8]  # the oldest first
        assert found.to_abort(0) == [begun[7]]
        assert not found.sampled(begun[7], 0), "what comes of it later is not wanted"
        assert found.dispatch(0) == [Attempt(7, 1)]
    else:
        finish(found, begun[7:], version=0)
        assert found.take(2) == [4, 5, 6, 7]


def test_a_group_that_ends_before_its_abort_arrives_is_not_aborted():
    """The engine no longer knows it."""
    found = scheduler(num_engines=1, max_staleness=0, over_sample=1.5, stragglers="abort")
    Prompts(found).top_up()
    begun = found.dispatch(0)
    finish(found, begun[:4])
    found.take(1)
    assert not found.sampled(begun[4], 0)
    assert found.to_abort(0) == begun[5:]
    assert not found.sampled(begun[5], 0)
    assert not found.has_aborts


def test_a_dead_engine_loses_no_prompt():
    found = scheduler()
    Prompts(found).top_up()
    lost, others = found.dispatch(0), found.dispatch(1)
    found.engine_lost(0)
    assert found.dispatch(0) == []
    again = found.dispatch(1)
    assert again == [Attempt(attempt.group, 1) for attempt in lost]
    assert not found.sampled(lost[0], 0)
    finish(found, others + again)
    assert found.events["lost"] == len(lost)
    found.engines_back()
    assert not found.has_lost_engines


def test_dynamic_sampling_gives_up_after_enough_drops():
    found = scheduler(num_engines=1, max_refills=1, over_sample=2.0)
    prompts = Prompts(found)
    for num_dropped in (4, 4, 0):
        assert found.has_given_up is (num_dropped == 0)
        prompts.top_up()
        for number, attempt in enumerate(found.dispatch(0)):
            found.sampled(attempt, 0)
            found.graded(attempt, is_kept=number >= num_dropped)
    account = found.account()
    assert (account.dropped, account.drawn) == (8, account.under_way + 8)


def test_at_the_end_of_a_run_nothing_is_sampled_for_later_steps():
    found = scheduler(num_engines=1, num_steps=2)
    prompts = Prompts(found)
    for step in (1, 2):
        prompts.top_up()
        finish(found, found.dispatch(0))
        assert found.is_ready(step)
        found.take(step)
        found.pushed(step)
    assert prompts.top_up() == 0
    assert found.account().under_way == 0
    assert found.account().drawn == found.account().trained == 8


def test_a_checkpoint_keeps_what_is_ready_and_begins_the_rest_again():
    found = scheduler()
    Prompts(found).top_up()
    first, second = found.dispatch(0), found.dispatch(1)
    finish(found, first)
    found.sampled(second[0], 0)
    other = scheduler()
    other.load_state_dict(found.state_dict(), step=0)
    assert other.account().ready == len(first)
    assert other.account().waiting == len(second)
    assert other.account().drawn == found.account().drawn
    again = other.dispatch(0) + other.dispatch(1)
    assert again == [Attempt(attempt.group, 0) for attempt in second]


class RandomRun:
    """A run over random orders of endings, deaths, resumes and late results; it checks every bound on the way."""

    def __init__(self, seed):
        chance = self.chance = random.Random(seed)
        self.num_engines, self.max_staleness = chance.randint(1, 3), chance.randint(0, 4)
        self.over_sample = max(1.0, self.max_staleness + 1 + chance.choice([-1.5, -0.5, 0.0, 0.5, 1.0]))
        is_wasteful = self.over_sample > self.max_staleness + 1
        self.rules = {
            **{"max_staleness": self.max_staleness, "over_sample": self.over_sample},
            **{"num_steps": 6, "max_refills": 1000},
            "stragglers": "abort" if is_wasteful else chance.choice(["wait", "abort"]),
        }
        self.may_drop = chance.random() < 0.5
        self.found = scheduler(self.num_engines, **self.rules)
        self.prompts = Prompts(self.found)
        self.nothing_inside()
        self.versions, self.num_dropped = {}, 0
        self.events = [self.ends] * 8 + [self.is_graded] * 8 + [self.dies, self.late_result, self.resumes]

    def nothing_inside(self):
        self.inside = {engine: {} for engine in range(self.num_engines)}  # attempt -> version
        self.late, self.ungraded = [], []

    def step(self, step):
        """Returns the groups that the step takes."""
        self.prompts.top_up()
        while not self.found.is_ready(step):
            for engine in self.inside:
                self.inside[engine] |= dict.fromkeys(self.found.dispatch(engine), self.found.version)
            self.chance.choice(self.events)(self.chance.randrange(self.num_engines), step)
            self.prompts.top_up()
            self.check_account()
        taken = self.found.take(step)
        assert len(taken) == 4
        assert all(step - 1 - self.max_staleness <= self.versions[group] <= step - 1 for group in taken)
        for _ in range(self.chance.randrange(4)):
            self.ends(self.chance.randrange(self.num_engines), step, oldest=step - self.max_staleness)
        for engine, attempts in self.inside.items():
            for attempt in self.found.to_abort(engine):
                self.late.append(attempt)
                del attempts[attempt]
            # an engine refuses weights that make what is in it too old
            assert all(version >= step - self.max_staleness for version in attempts.values())
        self.found.pushed(step)
        self.found.engines_back()
        return taken

    def check_account(self):
        account = self.found.account()
        assert account.drawn == account.trained + account.dropped + account.under_way == self.prompts.next
        assert account.dropped == self.num_dropped
        assert account.under_way <= math.ceil(self.over_sample * 4)

    def ends(self, engine, _step, oldest=0):
        """A group is complete; after a step has taken its groups, perhaps one that was given up at that moment."""
        if self.inside[engine]:
            attempt = self.chance.choice(sorted(self.inside[engine]))
            version = self.inside[engine].pop(attempt)
            is_wanted = version >= oldest
            assert self.found.sampled(attempt, version) is is_wanted
            if is_wanted:
                self.versions[attempt.group] = version
                self.ungraded.append(attempt)

    def is_graded(self, _engine, _step):
        if self.ungraded:
            attempt = self.ungraded.pop(self.chance.randrange(len(self.ungraded)))
            is_kept = not self.may_drop or self.chance.random() < 0.5
            self.num_dropped += self.found.graded(attempt, is_kept=is_kept) and not is_kept

    def dies(self, engine, _step):
        self.late += self.inside[engine]
        self.inside[engine] = {}
        self.found.engine_lost(engine)
        if self.chance.random() < 0.7 or all(self.found.is_lost(engine) for engine in self.inside):
            self.found.engines_back()

    def late_result(self, _engine, _step):
        if self.late:
            assert not self.found.sampled(self.chance.choice(self.late), self.found.version)

    def resumes(self, _engine, step):
        if self.chance.random() < 0.1:
            state = self.found.state_dict()
            if self.chance.random() < 0.3:  # resumed with a tighter bound than before
                self.max_staleness = self.chance.randint(0, self.max_staleness)
                self.rules |= {"max_staleness": self.max_staleness, "stragglers": "abort"}
            self.found = self.prompts.scheduler = scheduler(self.num_engines, **self.rules)
            self.found.load_state_dict(state, step=step - 1)
            self.nothing_inside()


def test_every_drawn_prompt_is_trained_once_dropped_or_under_way():
    """And no group is trained beyond the bound."""
    for seed in range(150):
        run, trained = RandomRun(seed), Counter()
        for step in range(1, 7):
            trained.update(run.step(step))
        assert set(trained.values()) == {1}, seed
        assert sum(trained.values()) == run.found.account().trained == 24, seed
