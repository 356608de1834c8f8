"""Simulates engines and a trainer under the run's own scheduler of groups, without a clock of its own.

An engine decodes one token of each of its ``b`` sequences every ``decode_s + b * decode_per_sequence_s`` seconds, so
all of them move on together: a sequence of length ``L`` that begins when the engine has made ``K`` steps ends at step
``K + L``. Prompts cost nothing. Groups begin and end through ``GroupScheduler``, as in a run; only the slices of time
in which a run asks its engines are left out.
"""

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gtpo_megatron.orchestration.loop.group_scheduler import GroupScheduler, SchedulerRules
from gtpo_megatron.orchestration.stages.engines import Attempt
from gtpo_megatron.rollout.requests import SampleRequest, assign_to_engines

P99 = 2.3263
"""Of the standard normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds.

    Attributes:
        decode_s: decode step of an engine with no sequence.
        decode_per_sequence_s: time that each sequence adds to a decode step.
        train_s: scoring, credit and update of a step.
        push_s: time of a push; engines do not decode meanwhile.
    """

    decode_s: float
    decode_per_sequence_s: float
    train_s: float
    push_s: float


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lognormal response lengths, partly a property of the prompt.

    Attributes:
        median: median length in tokens.
        p99_over_median: how heavy the tail is.
        longest: limit of the length in tokens.
        prompt_share: share of the variance of log length that a group's responses have in common.
    """

    median: float
    p99_over_median: float
    longest: int
    prompt_share: float = 0.5

    def of_group(self, group: int, size: int, seed: int) -> list[int]:
        """The same for every mode that samples the group."""
        chance = random.Random(f"{seed}:{group}")
        sigma = math.log(self.p99_over_median) / P99
        common = math.sqrt(self.prompt_share) * chance.gauss(0, 1)
        own = math.sqrt(1 - self.prompt_share)
        logs = [sigma * (common + own * chance.gauss(0, 1)) for _ in range(size)]
        return [max(1, min(self.longest, round(self.median * math.exp(value)))) for value in logs]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to sample.

    Attributes:
        max_staleness: most pushes between sampling and training; 0 or 1 without the next two: step by step, as
            ``StepwiseSampling``.
        partial: a push does not wait.
        over_sample: groups under way for each group that a step takes; None: ``max_staleness + 1``.
        stragglers: treatment of groups that would be too old.
        is_stepwise: all groups of a step begin together.
    """

    max_staleness: int
    partial: bool = False
    over_sample: float | None = None
    stragglers: str = "wait"
    is_stepwise: bool = False


@dataclass
class Result:
    """What a mode did.

    Attributes:
        seconds: time of every step, from push to push.
        staleness: pushes between sampling and training, of each trained group.
        num_again: groups that were sampled more than once.
        tokens: trained tokens.
        busy: share of the time in which an engine had a sequence.
        waited: seconds that the trainer waited for the groups of every step.
    """

    seconds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    num_again: int = 0
    tokens: int = 0
    busy: float = 0.0
    waited: list[float] = field(default_factory=list)


class Engine:
    """The sequences inside an engine, by its own count of decode steps."""

    def __init__(self, rates: Rates, max_concurrent: int) -> None:
        self._rates = rates
        self._max_concurrent = max_concurrent
        self._steps = 0.0
        self._seen_at = 0.0
        self._active: list[tuple[float, int, object]] = []  # step at which it ends, tie-breaker, owner
        self._queue: deque[tuple[int, object]] = deque()
        self._count = itertools.count()
        self.busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it has no sequence."""
        return not self._active

    def _step_s(self) -> float:
        return self._rates.decode_s + len(self._active) * self._rates.decode_per_sequence_s

    def move_to(self, now: float, *, is_paused: bool = False) -> None:
        """Decodes up to a time, or lets it pass."""
        if self._active and not is_paused:
            self._steps += (now - self._seen_at) / self._step_s()
            self.busy_s += now - self._seen_at
        self._seen_at = now

    def add(self, owner: object, length: int) -> None:
        """Takes a sequence, which begins when there is room."""
        self._queue.append((length, owner))
        self._fill()

    def remove(self, owner: object) -> None:
        """Gives up all sequences of an owner."""
        self._queue = deque(item for item in self._queue if item[1] != owner)
        self._active = [item for item in self._active if item[2] != owner]
        heapq.heapify(self._active)
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._active) < self._max_concurrent:
            length, owner = self._queue.popleft()
            heapq.heappush(self._active, (self._steps + length, next(self._count), owner))

    def next_end(self) -> float:
        """Time at which the next sequence ends."""
        if not self._active:
            return math.inf
        return self._seen_at + max(0.0, self._active[0][0] - self._steps) * self._step_s()

    def ended(self) -> Iterator[object]:
        """Owners of the sequences that have ended by now."""
        while self._active and self._active[0][0] <= self._steps + 1e-9:
            yield heapq.heappop(self._active)[2]
        self._fill()


@dataclass(kw_only=True)
class Simulation:
    """A run.

    Args:
        rates: of engines and trainer.
        lengths: per group, tokens of its responses.
        num_engines: number of engines.
        max_concurrent: sequences that an engine decodes together.
        groups_per_step: prompts of a step.
        group_size: responses per prompt.
        num_steps: of the run.
    """

    rates: Rates
    lengths: Callable[[int], list[int]]
    num_engines: int
    max_concurrent: int
    groups_per_step: int
    group_size: int
    num_steps: int

    def run(self, mode: Mode) -> Result:
        """Simulates a mode from its first step to its last push."""
        return self._stepwise(mode) if mode.is_stepwise else self._continuous(mode)

    # ------------------------------------------------------------------------------------------------------ stepwise
    def _stepwise(self, mode: Mode) -> Result:
        result = Result()
        generation = [self._generation_s(step, result) for step in range(self.num_steps)]
        ahead = [*generation[1:], 0.0]
        for step, sampled in enumerate(generation):
            if mode.max_staleness == 0:
                result.waited.append(sampled)
                result.seconds.append(sampled + self.rates.train_s + self.rates.push_s)
            else:
                waited = sampled if step == 0 else 0.0
                result.waited.append(waited if step == 0 else max(0.0, sampled - self.rates.train_s))
                result.seconds.append(waited + max(self.rates.train_s, ahead[step]) + self.rates.push_s)
            result.staleness += [min(step, mode.max_staleness)] * self.groups_per_step
        result.busy /= sum(result.seconds) * self.num_engines
        return result

    def _generation_s(self, step: int, result: Result) -> float:
        """All responses of a step, dealt to the engines as a run deals them."""
        groups = range(step * self.groups_per_step, (step + 1) * self.groups_per_step)
        lengths = [length for group in groups for length in self.lengths(group)]
        requests = [SampleRequest(prompt_ids=(1,), group_id=0, sample=row) for row in range(len(lengths))]
        dealt = assign_to_engines(requests, max_response_tokens=1, loads=[0] * self.num_engines)
        result.tokens += sum(lengths)
        longest = 0.0
        for index in range(self.num_engines):
            engine, now = Engine(self.rates, self.max_concurrent), 0.0
            for length, engine_of in zip(lengths, dealt, strict=True):
                if engine_of == index:
                    engine.add(None, length)
            while not engine.is_idle:
                now = engine.next_end()
                engine.move_to(now)
                list(engine.ended())
            longest = max(longest, now)
            result.busy += engine.busy_s
        return longest

    # ---------------------------------------------------------------------------------------------------- continuous
    def _continuous(self, mode: Mode) -> Result:
        scheduler = GroupScheduler(
            SchedulerRules(
                groups_per_step=self.groups_per_step,
                group_size=self.group_size,
                max_staleness=mode.max_staleness,
                over_sample=mode.max_staleness + 1 if mode.over_sample is None else mode.over_sample,
                stragglers="abort" if mode.stragglers == "abort" else "wait",
                max_concurrent=self.max_concurrent,
                num_steps=self.num_steps,
            ),
            num_engines=self.num_engines,
        )
        world = _World(self, scheduler)
        result = Result()
        last_push = 0.0
        for step in range(1, self.num_steps + 1):
            scheduler.is_paused = False
            trained_at = world.now
            world.run_until(functools.partial(scheduler.is_ready, step))
            result.waited.append(world.now - trained_at)
            for group in scheduler.take(step):
                result.staleness.append(step - 1 - world.versions[group])
                result.tokens += sum(self.lengths(group))
            scheduler.is_paused = mode.max_staleness == 0
            world.abort()
            world.run_for(self.rates.train_s)
            if not mode.partial:
                scheduler.is_paused = True
                world.run_until(lambda: scheduler.num_sampling == 0)
            world.pause_for(self.rates.push_s)
            scheduler.pushed(step)
            if mode.max_staleness:
                scheduler.is_paused = False
            result.seconds.append(world.now - last_push)
            last_push = world.now
        events = scheduler.take_events()
        result.num_again = events["aborted"] + events["too_old"]
        result.busy = sum(engine.busy_s for engine in world.engines) / (world.now * self.num_engines)
        return result


class _World:
    """Engines, and the groups inside them."""

    def __init__(self, simulation: Simulation, scheduler: GroupScheduler) -> None:
        self.now = 0.0
        self.versions: dict[int, int] = {}
        self.engines = [Engine(simulation.rates, simulation.max_concurrent) for _ in range(simulation.num_engines)]
        self._simulation = simulation
        self._scheduler = scheduler
        self._left: dict[Attempt, int] = {}
        self._begun: dict[Attempt, int] = {}
        self._drawn = 0

    def run_until(self, is_done: Callable[[], bool]) -> None:
        self._deal()
        while not is_done():
            assert self._next_ends(before=math.inf), "nothing is sampled, and the step waits"

    def run_for(self, seconds: float) -> None:
        until = self.now + seconds
        self._deal()
        while self._next_ends(before=until):
            pass
        self.now = until

    def pause_for(self, seconds: float) -> None:
        for engine in self.engines:
            engine.move_to(self.now)
        self.now += seconds
        for engine in self.engines:
            engine.move_to(self.now, is_paused=True)

    def abort(self) -> None:
        for index, engine in enumerate(self.engines):
            for attempt in self._scheduler.to_abort(index):
                engine.move_to(self.now)
                engine.remove(attempt)
                self._left.pop(attempt)

    def _next_ends(self, *, before: float) -> bool:
        """Moves to the next end of a sequence, if there is one before this time."""
        end, index = min((engine.next_end(), index) for index, engine in enumerate(self.engines))
        if not end < before:
            return False
        self.now, engine = end, self.engines[index]
        engine.move_to(end)
        is_any_whole = False
        for owner in engine.ended():
            assert isinstance(owner, Attempt)
            self._left[owner] -= 1
            if self._left[owner] == 0:
                is_any_whole = True
                del self._left[owner]
                self.versions[owner.group] = self._begun.pop(owner)
                self._scheduler.sampled(owner, self.versions[owner.group])
                self._scheduler.graded(owner, is_kept=True)
        if is_any_whole:
            self._deal()
        return True

    def _deal(self) -> None:
        num = self._scheduler.num_wanted()
        self._scheduler.add(range(self._drawn, self._drawn + num))
        self._drawn += num
        for index, engine in enumerate(self.engines):
            for attempt in self._scheduler.dispatch(index):
                lengths = self._simulation.lengths(attempt.group)
                self._left[attempt], self._begun[attempt] = len(lengths), self._scheduler.version
                engine.move_to(self.now)
                for length in lengths:
                    engine.add(attempt, length)
