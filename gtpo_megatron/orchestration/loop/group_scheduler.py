"""Decides which prompt is sampled when and on which engine, and which groups a step trains.

A group is one prompt with its ``G`` responses. With ``B`` groups per step, staleness bound ``N``
(``rollout.max_staleness``) and ``C = rollout.over_sample``, at a time when ``t`` steps have taken their groups and the
engines have the weights of version ``v``:

- **Back-pressure.** At most ``(v - t + C) B`` groups are under way: waiting, being sampled, being graded, or ready.
  With ``C = N + 1`` and first-come first-served no group can become too old.
- **Staleness.** Step ``k`` starts from version ``k - 1`` and trains groups whose oldest token is of version
  ``k - 1 - N`` or newer. The oldest ready groups are taken first.
- **Stragglers.** A group that would be too old for the next step is waited for (``wait``: no response is lost for being
  long), or aborted when enough others are ready (``abort``: its prompt is sampled again, before any new one; its
  seeds are the same, so a slow group is slow again, and after ``MAX_ABORTS`` tries it is waited for).
- **Account.** Every drawn prompt is in exactly one place: ``drawn = trained + dropped + under way``. A group whose
  engine dies, that is aborted or that becomes too old is sampled again; only dynamic sampling drops prompts.

The scheduler has no threads, no clock and no engines: the run and ``companions/goodput/simulation.py`` drive the same
code.
"""

import bisect
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gtpo_megatron.orchestration.stages.engines import Attempt

QUEUED_GROUPS = 1
"""Groups that an engine holds beyond its concurrency, so that it is not idle until it is given the next."""

MAX_ABORTS = 2
"""Tries of a group that are given up. Without a limit the slowest prompts would be sampled at every step and never be
trained, and the room of new ones would go to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerRules:
    """The bounds.

    Attributes:
        groups_per_step: ``B``.
        group_size: ``G``.
        max_staleness: ``N``.
        over_sample: ``C``, at least 1.
        stragglers: treatment of groups that would be too old for the next step.
        max_concurrent: sequences that an engine decodes together.
        num_steps: last step of the run; nothing is sampled for steps after it.
        max_refills: dynamic sampling gives up after ``(1 + max_refills) B`` dropped groups without a step.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    over_sample: float
    stragglers: Literal["wait", "abort"]
    max_concurrent: int
    num_steps: int
    max_refills: int = 0


def labels_sum(labels: Iterable[int]) -> int:
    """Sum of 64-bit hashes of group labels, modulo 2^64: equal for equal sets, and not for one with a repetition."""
    digests = (hashlib.blake2b(str(label).encode(), digest_size=8).digest() for label in labels)
    return sum(int.from_bytes(digest, "big") for digest in digests) % (1 << 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Where the drawn prompts are.

    Attributes:
        drawn: prompts drawn in the run.
        trained: taken by a step.
        dropped: dropped by dynamic sampling.
        waiting: number of groups that wait to be sampled.
        sampling: inside an engine.
        grading: sampled, without a reward.
        ready: graded, for the next steps.
    """

    drawn: int
    trained: int
    dropped: int
    waiting: int
    sampling: int
    grading: int
    ready: int

    @property
    def under_way(self) -> int:
        """Drawn, but neither trained nor dropped."""
        return self.waiting + self.sampling + self.grading + self.ready


@dataclass(kw_only=True, slots=True)
class _Group:
    """A group under way; those that wait are in another list."""

    attempt: Attempt
    place: Literal["sampling", "grading", "ready"]
    version: int  # of its oldest token, or a lower bound of it while it is sampled
    engine: int = -1


@dataclass(slots=True)
class GroupScheduler:
    """The state of all groups under way.

    Args:
        rules: the bounds.
        num_engines: number of engines.
    """

    rules: SchedulerRules
    num_engines: int
    version: int = 0
    num_taken: int = 0
    is_paused: bool = False
    events: "Counter[str]" = field(default_factory=Counter)
    """Since the last ``take_events``: ``aborted``, ``too_old`` and ``lost`` groups, which are sampled again, and
    ``dropped`` ones."""
    _groups: dict[int, _Group] = field(default_factory=dict)  # all but the waiting ones, by label
    _waiting: list[Attempt] = field(default_factory=list)  # sorted
    _on_engine: "Counter[int]" = field(default_factory=Counter)  # groups that are sampled, by engine
    _lost_engines: set[int] = field(default_factory=set)
    _to_abort: dict[int, list[Attempt]] = field(default_factory=dict)
    _drawn: int = 0
    _trained: int = 0
    _dropped: int = 0
    _dropped_since_take: int = 0
    _closed_sum: int = 0  # ``labels_sum`` of trained and dropped groups

    # ------------------------------------------------------------------------------------------------ prompts come in
    def num_wanted(self) -> int:
        """Number of prompts to draw now."""
        rules = self.rules
        ahead = self.version - self.num_taken + rules.over_sample
        needed = rules.num_steps - self.num_taken + max(0.0, rules.over_sample - rules.max_staleness - 1)
        limit = math.ceil(min(ahead, needed) * rules.groups_per_step)
        return max(0, limit - len(self._groups) - len(self._waiting))

    def add(self, groups: Iterable[int]) -> None:
        """Adds drawn prompts, by the labels of their groups, which must be new."""
        for group in groups:
            bisect.insort(self._waiting, Attempt(group, 0))
            self._drawn += 1

    # ------------------------------------------------------------------------------------------------------- sampling
    def dispatch(self, engine: int) -> list[Attempt]:
        """Starts groups on an engine, the earliest first; returns them.

        All engines get about the same number of groups, up to what they decode together.
        """
        is_too_early = self.version < self.num_taken - self.rules.max_staleness
        if self.is_paused or is_too_early or engine in self._lost_engines:
            return []
        num_live = self.num_engines - len(self._lost_engines)
        share = math.ceil((len(self._waiting) + self.num_sampling) / num_live)
        room = math.ceil(self.rules.max_concurrent / self.rules.group_size) + QUEUED_GROUPS
        num_started = max(0, min(share, room) - self._on_engine[engine])
        started, self._waiting = self._waiting[:num_started], self._waiting[num_started:]
        for attempt in started:
            self._groups[attempt.group] = _Group(attempt=attempt, place="sampling", version=self.version, engine=engine)
        self._on_engine[engine] += len(started)
        return started

    def to_abort(self, engine: int) -> list[Attempt]:
        """Returns the tries to abort on an engine, once."""
        return self._to_abort.pop(engine, [])

    @property
    def has_aborts(self) -> bool:
        """Whether there is something to abort."""
        return bool(self._to_abort)

    def sampled(self, attempt: Attempt, version: int) -> bool:
        """Records that an engine has all responses of a group.

        Args:
            attempt: the try.
            version: policy version of the oldest token.

        Returns:
            Whether they are wanted; False if the try was given up.
        """
        group = self._current(attempt, "sampling")
        if group is None:
            self._forget_abort(attempt)
            return False
        self._on_engine[group.engine] -= 1
        group.place, group.version = "grading", version
        return True

    def graded(self, attempt: Attempt, *, is_kept: bool) -> bool:
        """Records that a group has its rewards.

        Args:
            attempt: the try.
            is_kept: False: dynamic sampling drops the prompt.

        Returns:
            Whether the rewards are wanted; False if the try was given up.
        """
        group = self._current(attempt, "grading")
        if group is None:
            return False
        if is_kept:
            group.place = "ready"
        else:
            del self._groups[attempt.group]
            self._dropped += 1
            self._dropped_since_take += 1
            self._close([attempt.group])
            self.events["dropped"] += 1
        return True

    def num_on(self, engine: int) -> int:
        """Groups inside an engine."""
        return self._on_engine[engine]

    @property
    def num_sampling(self) -> int:
        """Groups inside the engines."""
        return self._on_engine.total()

    def pushed(self, version: int) -> None:
        """Records that the engines have new weights."""
        self.version = version

    def engine_lost(self, engine: int) -> None:
        """Records that an engine died: its groups are sampled again, on others."""
        self._lost_engines.add(engine)
        self._to_abort.pop(engine, None)
        for group in list(self._groups.values()):
            if group.place == "sampling" and group.engine == engine:
                self._again(group, "lost")

    def engines_back(self) -> None:
        """Records that all engines live and have weights."""
        self._lost_engines.clear()

    def is_lost(self, engine: int) -> bool:
        """Whether an engine has died and has no replacement yet."""
        return engine in self._lost_engines

    @property
    def has_lost_engines(self) -> bool:
        """Whether an engine has no replacement yet."""
        return bool(self._lost_engines)

    # ------------------------------------------------------------------------------------------- a step takes groups
    def is_ready(self, step: int) -> bool:
        """Whether a step can take its groups, or has to do with fewer, perhaps none, since no others are looked for."""
        oldest_of_next = step - self.rules.max_staleness
        if self._places()["ready"] < self.rules.groups_per_step and not self.has_given_up:
            return False
        return not any(
            group.place != "ready" and group.version < oldest_of_next and self._is_waited_for(group.attempt)
            for group in self._groups.values()
        )

    def _is_waited_for(self, attempt: Attempt) -> bool:
        return self.rules.stragglers == "wait" or attempt.number >= MAX_ABORTS

    @property
    def has_given_up(self) -> bool:
        """Whether dynamic sampling has dropped so many groups since the last step that it stops looking for others."""
        limit = (1 + self.rules.max_refills) * self.rules.groups_per_step
        return self._dropped_since_take >= limit

    def take(self, step: int) -> list[int]:
        """The groups that a step trains, by label, once ``is_ready`` is true; gives up what is too old for the next."""
        ready = sorted((group.version, label) for label, group in self._groups.items() if group.place == "ready")
        taken = sorted(label for _, label in ready[: self.rules.groups_per_step])
        for label in taken:
            del self._groups[label]
        self._trained += len(taken)
        self._close(taken)
        self._dropped_since_take = 0
        self.num_taken = step
        for group in list(self._groups.values()):
            if group.version < step - self.rules.max_staleness:
                if group.place == "sampling":
                    self._to_abort.setdefault(group.engine, []).append(group.attempt)
                self._again(group, "aborted" if group.place == "sampling" else "too_old")
        return taken

    def ready_labels(self) -> set[int]:
        """Groups that the next steps can take."""
        return {label for label, group in self._groups.items() if group.place == "ready"}

    def grading_attempts(self) -> set[Attempt]:
        """Tries that wait for their rewards."""
        return {group.attempt for group in self._groups.values() if group.place == "grading"}

    def take_events(self) -> "Counter[str]":
        """Returns and resets the events."""
        events, self.events = self.events, Counter()
        return events

    # -------------------------------------------------------------------------------------------------------- account
    def account(self) -> Account:
        """Where the drawn prompts are."""
        places = self._places()
        return Account(
            drawn=self._drawn,
            trained=self._trained,
            dropped=self._dropped,
            waiting=len(self._waiting),
            sampling=places["sampling"],
            grading=places["grading"],
            ready=places["ready"],
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: ready groups are kept, all others under way are sampled again by a resumed run."""
        ready = self.ready_labels()
        return {
            "drawn": self._drawn,
            "trained": self._trained,
            "dropped": self._dropped,
            "dropped_since_take": self._dropped_since_take,
            "closed_sum": self._closed_sum,
            "ready": {label: self._groups[label].version for label in sorted(ready)},
            "waiting": sorted([attempt.group for attempt in self._waiting] + list(self._groups.keys() - ready)),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, step: int) -> None:
        """Continues after a step, whose weights the engines have.

        Groups that were ready by a wider bound, and are too old by the one of now, are sampled again.
        """
        self._drawn, self._trained = state["drawn"], state["trained"]
        self._dropped, self._dropped_since_take = state["dropped"], state["dropped_since_take"]
        self._closed_sum = state["closed_sum"]
        self.version = self.num_taken = step
        oldest = step - self.rules.max_staleness
        self._groups = {
            label: _Group(attempt=Attempt(label, 0), place="ready", version=version)
            for label, version in state["ready"].items()
            if version >= oldest
        }
        self._waiting = sorted(
            Attempt(label, 0) for label in {*state["waiting"], *state["ready"]} - self._groups.keys()
        )

    def _close(self, labels: Iterable[int]) -> None:
        self._closed_sum = (self._closed_sum + labels_sum(labels)) % (1 << 64)

    def _places(self) -> "Counter[str]":
        return Counter(group.place for group in self._groups.values())

    def _current(self, attempt: Attempt, place: str) -> _Group | None:
        group = self._groups.get(attempt.group)
        return group if group is not None and group.attempt == attempt and group.place == place else None

    def _forget_abort(self, attempt: Attempt) -> None:
        """A try that ended before its abort was sent is no longer known to its engine."""
        remaining = {engine: [other for other in tries if other != attempt] for engine, tries in self._to_abort.items()}
        self._to_abort = {engine: tries for engine, tries in remaining.items() if tries}

    def _again(self, group: _Group, reason: str) -> None:
        """Back to the waiting ones, with its label and so before all that were drawn later."""
        self.events[reason] += 1
        if group.place == "sampling":
            self._on_engine[group.engine] -= 1
        del self._groups[group.attempt.group]
        bisect.insort(self._waiting, Attempt(group.attempt.group, group.attempt.number + 1))
