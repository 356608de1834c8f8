"""Samples all responses of a step together, when it begins or during the step before.

With ``rollout.max_staleness=1`` the responses of step ``k + 1`` are sampled while step ``k`` trains, with the weights
that step ``k`` started from. A push waits for them, so every response comes from one version of the weights, which does
not depend on timing: a run is reproducible.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.batch import Problem, PromptBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import EngineLostError
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.sampling import DrawPrompts, NoteOutcomes, SampledStep, no_note, sample_groups
from gtpo_megatron.orchestration.loop.sampling_state import from_plain, to_plain
from gtpo_megatron.orchestration.stages.stages import Stages

logger = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 20.0
"""Longest wait for each sampling thread when a run ends early."""


class StepwiseSampling:
    """Provides the responses of every step, in order.

    Args:
        draw: draws prompts; called in the order of the steps.
        stages: the stages of a step.
        config: the run's configuration.
        note: is told how every group came out, before the prompts of the next step are drawn.
    """

    def __init__(self, draw: DrawPrompts, stages: Stages, config: RunConfig, note: NoteOutcomes = no_note) -> None:
        self._draw, self._note = draw, note
        self._stages = stages
        self._config = config
        self._ahead = config.rollout.max_staleness
        self._started = 0
        self._version = 0
        self._running: dict[int, _Sampling] = {}
        self._ready: dict[int, SampledStep] = {}
        self._lost: dict[int, _Replay] = {}

    def begin_at(self, step: int) -> None:
        """Sets the first step, unless ``load_state_dict`` has set a later one."""
        self._started = max(self._started, step - 1)

    def take(self, step: int) -> SampledStep:
        """Returns the responses of a step, and starts sampling ahead for the next ones.

        Raises:
            GTPOError: sampling or grading failed.
        """
        self._version = step - 1
        last = min(step + self._ahead, max(step, self._config.num_steps))
        while self._started < last:
            self._started += 1
            self._start(self._started)
        if step in self._running:
            with self._stages.timers.stage("rollout_wait"):
                self._collect(step, is_pushed_to_next=False)
        self._make_up()
        sampled = self._ready.pop(step)
        for name, seconds in sampled.seconds.items():
            self._stages.timers.add(name, seconds)
        return sampled

    def before_push(self) -> None:
        """Waits until no request is in flight."""
        self._collect_all(is_pushed_to_next=True)

    def after_push(self, version: int) -> None:
        """Samples again what was lost with an engine, now that its replacement has weights.

        Args:
            version: version of the pushed weights.
        """
        self._version = version
        self._make_up()

    def drain(self) -> None:
        """Waits until no request is in flight, before other uses of the engines; call it after a push."""
        if self._running:
            self._collect_all(is_pushed_to_next=False)
            self._make_up()

    def close(self) -> None:
        """Aborts requests in flight, if a run ends early."""
        left = [sampling for sampling in self._running.values() if not sampling.future.done()]
        if left:
            self._stages.engine.abandon()
            for sampling in left:
                sampling.thread.join(CLOSE_PATIENCE_S)

    @contextmanager
    def frozen(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Waits until no request is in flight; yields what makes the ``state_dict``: responses sampled ahead."""
        self.drain()
        yield self._state_dict

    def _state_dict(self) -> dict[str, Any]:
        return {
            "started": self._started,
            "ready": {step: to_plain(sampled, sampled.rollouts.fetch()) for step, sampled in self._ready.items()},
        }

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Continues after a step from a ``state_dict``."""
        del step
        self._started = state["started"]
        self._ready = {step: from_plain(plain, self._stages.engine.store) for step, plain in state["ready"].items()}

    def _start(self, step: int) -> None:
        draw = _Replay(self._draw)
        if self._ahead == 0:
            self._ready[step] = self._sample(draw, self._stages)
            return
        earlier = self._running[max(self._running)] if self._running else None
        timers = StageTimers()
        # an engine that dies in this thread gets its weights at the trainer's next push
        stages = dataclasses.replace(self._stages, timers=timers, engine=self._stages.engine.unattended())

        def sample() -> SampledStep:
            if earlier is not None:
                earlier.thread.join()  # prompts are drawn in the order of the steps
            sampled = self._sample(draw, stages)
            seconds = {name.removeprefix("timing/").removesuffix("_s"): value for name, value in timers.take().items()}
            return dataclasses.replace(sampled, seconds=seconds)

        self._running[step] = _Sampling.begin(sample, draw=draw, name=f"sampling of step {step}")

    def _sample(self, draw: "_Replay", stages: Stages) -> SampledStep:
        config = self._config
        return sample_groups(
            draw.rewound(),
            stages,
            config.rollout,
            config.algorithm,
            num_prompts=config.data.prompts_per_step,
            seed=config.seed,
            note=self._note,
        )

    def _collect_all(self, *, is_pushed_to_next: bool) -> None:
        if self._running:
            with self._stages.timers.stage("rollout_wait"):
                for step in sorted(self._running):
                    self._collect(step, is_pushed_to_next=is_pushed_to_next)

    def _make_up(self) -> None:
        for step in sorted(self._lost):
            self._ready[step] = self._sample(self._lost[step], self._stages)
            del self._lost[step]

    def _collect(self, step: int, *, is_pushed_to_next: bool) -> None:
        sampling = self._running[step]
        try:
            self._ready[step] = sampling.future.result()
        except EngineLostError as error:
            logger.warning("the responses of step %d are sampled again, from new weights: %s", step, error)
            if self._stages.engine.replace_lost() and not is_pushed_to_next:
                with self._stages.timers.stage("weight_sync"):
                    self._stages.weight_sync.push(version=self._version)
            self._lost[step] = sampling.draw
        del self._running[step]


class _Replay:
    """Draws prompts, and repeats them if a step is sampled again.

    Dynamic sampling may draw other numbers then: prompt by prompt it gets those of the first time, and others once
    there are no more.
    """

    def __init__(self, draw: DrawPrompts) -> None:
        self._draw = draw
        self._drawn: list[tuple[int, Problem]] = []  # group labels and problems

    def rewound(self) -> DrawPrompts:
        """A draw function that starts with the first prompts again."""
        position = 0

        def draw(num: int) -> PromptBatch:
            nonlocal position
            if (missing := position + num - len(self._drawn)) > 0:
                new = self._draw(missing)
                self._drawn += zip(new.group_ids, new.problems, strict=True)
            labels, problems = zip(*self._drawn[position : position + num], strict=True)
            position += num
            return PromptBatch(problems=problems, group_ids=labels)

        return draw


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampling:
    """Sampling in progress, in a daemon thread."""

    future: Future[SampledStep]
    thread: threading.Thread
    draw: _Replay

    @classmethod
    def begin(cls, sample: Callable[[], SampledStep], *, draw: _Replay, name: str) -> "_Sampling":
        future: Future[SampledStep] = Future()

        def run() -> None:
            try:
                future.set_result(sample())
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return cls(future=future, thread=thread, draw=draw)
