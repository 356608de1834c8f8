"""Samples group by group, while steps train: what a step takes need not have been begun together.

Two threads work beside the trainer's. One keeps the engines busy, slice by slice; the other grades whole groups. Which
group goes where, what a step takes and what is given up is decided by ``loop/group_scheduler.py``. With
``rollout.partial`` a push happens between two slices and requests in flight go on with the new weights; without it, the
push waits until none is in flight. Engines that died are replaced by the trainer's thread, which alone can push.

Runs do not repeat bit for bit: what is whole when a step begins depends on the clock. The account does: every prompt is
trained once, or dropped by dynamic sampling.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gtpo_megatron.batch import Problem, PromptBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.observability.metrics import Max, Mean, Sum, merge
from gtpo_megatron.orchestration.loop.group_scheduler import GroupScheduler, SchedulerRules
from gtpo_megatron.orchestration.loop.rollout_metrics import best_rewards, rollout_metrics
from gtpo_megatron.orchestration.loop.sampling import (
    DrawPrompts,
    NoteOutcomes,
    SampledStep,
    check_has_verdicts,
    informative,
    merged,
    no_note,
    outcomes,
)
from gtpo_megatron.orchestration.loop.sampling_state import from_plain, problem_from_plain, problem_to_plain, to_plain
from gtpo_megatron.orchestration.stages.engines import Attempt, GroupSampler
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, joined
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.orchestration.stages.trainer import Metrics

CLOSE_PATIENCE_S = 20.0
"""Longest wait for each thread when a run ends."""

LOOK_S = 1.0
"""Seconds between two looks of the trainer's thread at what it waits for."""


class ContinuousSampling:
    """Provides the responses of every step.

    Args:
        draw: draws prompts.
        stages: the stages of a step.
        config: the run's configuration.
        note: is told how every group came out.
    """

    def __init__(self, draw: DrawPrompts, stages: Stages, config: RunConfig, note: NoteOutcomes = no_note) -> None:
        rollout, dynamic = config.rollout, config.algorithm.dynamic_sampling
        self._draw = draw
        self._stages = stages
        self._config = config
        self._is_ahead = rollout.max_staleness > 0
        self._is_dynamic = dynamic.enabled
        self._note = note
        self._scheduler = GroupScheduler(
            SchedulerRules(
                groups_per_step=config.data.prompts_per_step,
                group_size=rollout.group_size,
                max_staleness=rollout.max_staleness,
                over_sample=rollout.max_staleness + 1 if rollout.over_sample is None else rollout.over_sample,
                stragglers=rollout.stragglers,
                max_concurrent=rollout.max_concurrent_sequences,
                num_steps=config.num_steps,
                max_refills=dynamic.max_refills,
            ),
            num_engines=rollout.num_engines,
            is_paused=True,
        )
        self._changed = threading.Condition()  # guards everything below
        self._problems: dict[int, Problem] = {}
        self._ungraded: dict[Attempt, RolloutHandle] = {}
        self._ready: dict[int, SampledStep] = {}
        self._dropped: list[SampledStep] = []  # by dynamic sampling, since the last step
        self._seconds = {"rollout": 0.0, "reward": 0.0}
        self._aborting: set[int] = set()  # engines with aborts under way
        self._is_closing = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------------------------------- the trainer's thread
    def begin_at(self, step: int) -> None:
        """Sets the first step; the engines have the weights that it starts from."""
        self._scheduler.version = self._scheduler.num_taken = step - 1

    def take(self, step: int) -> SampledStep:
        """Waits until a step can take its groups.

        Raises:
            GTPOError: sampling or grading failed.
            RolloutError: dynamic sampling found no informative group, or no response has a verdict.
        """
        with self._stages.timers.stage("rollout_wait"):
            with self._changed:
                self._resume()
            self._wait_until(lambda: self._scheduler.is_ready(step))
            with self._changed:
                sampled = self._taken(step)
                self._scheduler.is_paused = not self._is_ahead
                self._changed.notify_all()
            if not self._is_ahead:
                self._wait_until(self._is_quiet)
        for name, seconds in sampled.seconds.items():
            self._stages.timers.add(name, seconds)
        return sampled

    def before_push(self) -> None:
        """Waits until no request is in flight, or with ``rollout.partial`` until what is given up has been aborted."""
        with self._stages.timers.stage("rollout_wait"):
            self._pause_for_push()

    def after_push(self, version: int) -> None:
        """Goes on with the new weights; every engine has them, replacements included."""
        with self._changed:
            self._scheduler.pushed(version)
            self._scheduler.engines_back()
            if self._is_ahead:
                self._resume()

    def drain(self) -> None:
        """Waits until no request is in flight and everything is graded, and begins nothing before the next step."""
        with self._stages.timers.stage("rollout_wait"):
            self._wait_until_drained()

    def close(self) -> None:
        """Ends the threads, and with them what is in flight."""
        with self._changed:
            self._is_closing = True
            is_busy = not self._is_quiet()
            self._changed.notify_all()
        if is_busy and self._threads:
            self._stages.engine.abandon()
        for thread in self._threads:
            thread.join(CLOSE_PATIENCE_S)

    @contextmanager
    def frozen(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Within the block no prompt is drawn and no group changes its place; yields what makes the ``state_dict``.

        Graded groups are in it, the others as prompts: a resumed run samples them again. Nothing has to be waited for.
        """
        with self._changed:
            scheduled = self._scheduler.state_dict()
            problems = {label: self._problems[label] for label in scheduled["waiting"]}
            ready = {label: self._ready[label] for label in scheduled["ready"]}

            def state_dict() -> dict[str, Any]:
                return {
                    "scheduled": scheduled,
                    "problems": {label: problem_to_plain(problem) for label, problem in problems.items()},
                    "ready": {label: to_plain(group, group.rollouts.fetch()) for label, group in ready.items()},
                }

            yield state_dict

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Continues after a step from a ``state_dict``."""
        self._scheduler.load_state_dict(state["scheduled"], step=step)
        saved = {label: from_plain(plain, self._stages.engine.store) for label, plain in state["ready"].items()}
        self._problems = {label: problem_from_plain(plain) for label, plain in state["problems"].items()} | {
            label: group.prompts.problems[0] for label, group in saved.items()
        }
        self._ready = {label: saved[label] for label in self._scheduler.ready_labels()}

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits until a condition holds; raises what the threads raised; replaces engines that died."""
        while True:
            with self._changed:
                while not (is_done() or self._error or self._scheduler.has_lost_engines):
                    self._changed.wait(LOOK_S)
                if self._error:
                    raise self._error
                if is_done():
                    return
            self._replace_lost()

    def _replace_lost(self) -> None:
        version = self._scheduler.version
        if self._stages.engine.replace_lost():
            was_paused = self._pause_for_push()
            with self._stages.timers.stage("weight_sync"):
                self._stages.weight_sync.push(version=version)
            with self._changed:
                self._scheduler.is_paused = was_paused
        with self._changed:
            self._scheduler.engines_back()
            self._changed.notify_all()

    def _pause_for_push(self) -> bool:
        """Makes the engines ready for weights; returns whether they were paused before."""
        with self._changed:
            was_paused = self._scheduler.is_paused
            if not self._config.rollout.partial:
                self._scheduler.is_paused = True
            self._changed.notify_all()
            while not (self._has_no_aborts() if self._config.rollout.partial else self._is_quiet()):
                if self._error:
                    raise self._error
                self._changed.wait(LOOK_S)
        return was_paused

    def _wait_until_drained(self) -> None:
        with self._changed:
            self._scheduler.is_paused = True
            self._changed.notify_all()
        self._wait_until(lambda: self._is_quiet() and not self._scheduler.account().grading)

    def _is_quiet(self) -> bool:
        """Whether no request is in an engine."""
        return self._scheduler.num_sampling == 0 and self._has_no_aborts()

    def _has_no_aborts(self) -> bool:
        return not self._aborting and not self._scheduler.has_aborts

    def _resume(self) -> None:
        self._scheduler.is_paused = False
        self._top_up()
        if not self._threads:
            for name, work in (("sampling", self._sample), ("grading", self._grade)):
                thread = threading.Thread(target=self._guarded, args=(work,), name=f"{name} of groups", daemon=True)
                thread.start()
                self._threads.append(thread)
        self._changed.notify_all()

    def _top_up(self) -> None:
        """Draws as many prompts as may be under way, at most those of a step at once: an epoch may have no more."""
        while num := self._scheduler.num_wanted():
            prompts = self._draw(min(num, self._config.data.prompts_per_step))
            self._problems |= dict(zip(prompts.group_ids, prompts.problems, strict=True))
            self._scheduler.add(prompts.group_ids)

    def _taken(self, step: int) -> SampledStep:
        """The groups of a step as one batch."""
        events = self._scheduler.take_events()
        labels = self._scheduler.take(step)
        if not labels:
            raise RolloutError(
                f"dynamic sampling: none of {events['dropped']} groups has "
                f"{self._config.algorithm.dynamic_sampling.rule}; the prompts are all too easy or too hard for this "
                f"model: change the data, or raise group_size"
            )
        events += self._scheduler.take_events()
        groups = [self._ready.pop(label) for label in labels]
        for label in labels:
            del self._problems[label]
        for label in self._ready.keys() - self._scheduler.ready_labels():
            del self._ready[label]  # too old
        for attempt in self._ungraded.keys() - self._scheduler.grading_attempts():
            del self._ungraded[attempt]  # too old, before a grader was free
        dropped, self._dropped = self._dropped, []
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        staleness = [step - 1 - group.rollouts.policy_version for group in groups]
        num_taught = sum(bool(informative(group, self._config.algorithm)) for group in groups)
        account = self._scheduler.account()
        metrics: Metrics = {
            "rollout/staleness_mean": Mean(float(sum(staleness)), len(staleness)),
            "rollout/groups_taught_frac": Mean(float(num_taught), len(groups) + len(dropped)),
            "rollout/groups_dropped_count": Sum(events["dropped"]),
            "rollout/groups_aborted_count": Sum(events["aborted"]),
            "rollout/groups_too_old_count": Sum(events["too_old"]),
            "rollout/groups_lost_count": Sum(events["lost"]),
            "prompts/drawn_count": Max(account.drawn),
            "prompts/trained_count": Max(account.trained),
            "prompts/dropped_count": Max(account.dropped),
            "prompts/under_way_count": Max(account.under_way),
        }
        seen = [*groups, *dropped]
        metrics = merge([group.metrics for group in seen]) | best_rewards([group.rewards for group in seen]) | metrics
        sampled = merged(groups, [{label} for label in labels], metrics, max_spread=self._config.rollout.max_staleness)
        check_has_verdicts(sampled.rewards)
        return dataclasses.replace(sampled, seconds=seconds)

    # ---------------------------------------------------------------------------------------------- the other threads
    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the trainer's thread waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _sample(self) -> None:
        """Keeps the engines busy."""
        rollout = self._config.rollout
        sampler: GroupSampler = self._stages.engine.group_sampler(
            rollout.sampling, samples_per_prompt=rollout.group_size, seed=self._config.seed
        )
        busy: set[int] = set()
        while True:
            with self._changed:
                orders = self._orders(busy)
                while not (orders or busy or self._is_closing):
                    self._changed.wait()
                    orders = self._orders(busy)
                if self._is_closing:
                    return
            start = time.perf_counter()
            for engine, (begin, abort) in orders.items():
                sampler.begin_slice(engine, begin, abort)
                busy.add(engine)
            ends = sampler.ended_slices()
            with self._changed:
                self._seconds["rollout"] += time.perf_counter() - start
                for end in ends:
                    busy.discard(end.engine)
                    self._aborting.discard(end.engine)
                    if end.is_lost:
                        self._scheduler.engine_lost(end.engine)
                    for attempt, handle in end.groups.items():
                        if self._scheduler.sampled(attempt, handle.policy_version):
                            self._ungraded[attempt] = handle
                self._changed.notify_all()

    def _orders(self, busy: set[int]) -> dict[int, tuple[dict[Attempt, Problem], list[Attempt]]]:
        """What idle engines begin and abort; those that have nothing to do are left out."""
        orders = {}
        for engine in range(self._config.rollout.num_engines):
            if engine in busy:
                continue
            begin, abort = self._scheduler.dispatch(engine), self._scheduler.to_abort(engine)
            if abort:
                self._aborting.add(engine)
            if abort or self._scheduler.num_on(engine):
                orders[engine] = ({attempt: self._problems[attempt.group] for attempt in begin}, abort)
        return orders

    def _grade(self) -> None:
        """Grades what is whole, as many groups at once as there are."""
        while True:
            with self._changed:
                while not (self._ungraded or self._is_closing):
                    self._changed.wait()
                if self._is_closing:
                    return
                attempts = sorted(self._ungraded)
                handles = [self._ungraded.pop(attempt) for attempt in attempts]
                problems = [self._problems[attempt.group] for attempt in attempts]
            start = time.perf_counter()
            groups = self._scored(attempts, problems, handles)
            with self._changed:
                self._seconds["reward"] += time.perf_counter() - start
                for attempt, group in zip(attempts, groups, strict=True):
                    self._record(attempt, group)
                self._top_up()
                self._changed.notify_all()

    def _scored(
        self, attempts: list[Attempt], problems: list[Problem], handles: list[RolloutHandle]
    ) -> list[SampledStep]:
        prompts = PromptBatch(problems=tuple(problems), group_ids=tuple(attempt.group for attempt in attempts))
        rewards = self._stages.grade(joined(handles, max_spread=self._config.rollout.max_staleness), prompts)
        groups: list[SampledStep] = []
        first = 0
        for attempt, problem, handle in zip(attempts, problems, handles, strict=True):
            mine = rewards.select(range(first, first := first + len(handle.group_ids)))
            # of all that were graded together; only the sum over groups is used
            reward = dataclasses.replace(mine, num_over_budget=0 if groups else rewards.num_over_budget)
            groups.append(
                SampledStep(
                    prompts=PromptBatch(problems=(problem,), group_ids=(attempt.group,)),
                    rollouts=handle,
                    rewards=reward,
                    metrics=rollout_metrics(handle, reward),
                )
            )
        return groups

    def _record(self, attempt: Attempt, group: SampledStep) -> None:
        is_kept = not self._is_dynamic or bool(informative(group, self._config.algorithm))
        if not self._scheduler.graded(attempt, is_kept=is_kept):
            return
        self._note(outcomes(group, self._config.algorithm))
        if is_kept:
            self._ready[attempt.group] = group
        else:
            self._dropped.append(group)
            del self._problems[attempt.group]
