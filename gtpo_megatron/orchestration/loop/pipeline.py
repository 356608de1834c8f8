"""Each step's responses: sampled when the step begins, or ahead of it while the trainer is busy with those before.

With ``rollout.max_staleness=1`` the responses of step ``k + 1`` are sampled while step ``k`` trains, by the weights
that step ``k`` started from. A push waits for them, so every response comes from one version of the weights, and which
one does not depend on who was faster: a run that is repeated is the same.

With ``rollout.partial`` a push does not wait: what is in flight goes on with the new weights. And the responses of
step ``k + 2`` are begun while the last ones of step ``k + 1`` are still written, once the engines have the weights that
step ``k + 1`` starts from. They are no older than without ``partial``: begun one push before the step that they train,
and whole before it starts.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.batch import PromptBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import EngineLostError
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.sampling import DrawPrompts, Sampled, sample_groups
from gtpo_megatron.orchestration.loop.sampling_state import from_plain, to_plain
from gtpo_megatron.orchestration.stages.protocols import StepParts

logger = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 20.0
"""Longest wait, when a run ends early, for the thread that samples ahead."""


class RolloutPipeline:
    """Hands out the responses of every step, in order.

    Args:
        draw: hands out prompts; called in the order of the steps.
        parts: of the step.
        config: of the run.
    """

    def __init__(self, draw: DrawPrompts, parts: StepParts, config: RunConfig) -> None:
        self._draw = draw
        self._parts = parts
        self._config = config
        self._ahead = config.rollout.max_staleness
        self._survives_push = config.rollout.partial
        self._drawing = threading.Lock()
        self._started = 0
        self._version = 0
        self._running: dict[int, _Sampling] = {}
        self._ready: dict[int, Sampled] = {}
        self._lost: dict[int, _Replay] = {}

    def begin_at(self, step: int) -> None:
        """The first step that will be asked for, unless ``load_state_dict`` has said so."""
        self._started = max(self._started, step - 1)

    def take(self, step: int) -> Sampled:
        """The responses of a step; on the way, starts to sample those that may be ahead of it.

        Raises:
            GTPOError: sampling or grading failed.
        """
        self._version = step - 1
        last = min(step + self._ahead, max(step, self._config.num_steps))
        while self._started < last:
            self._started += 1
            self._start(self._started)
        if step in self._running:
            with self._parts.timers.stage("rollout_wait"):
                self._collect(step, is_pushed_to_next=False)
        self._make_up()
        sampled = self._ready.pop(step)
        for name, seconds in sampled.seconds.items():
            self._parts.timers.add(name, seconds)
        return sampled

    def before_push(self) -> None:
        """Waits until no request is in flight, or only looks what has ended where responses survive a push."""
        steps = [step for step, sampling in self._running.items() if not self._survives_push or sampling.future.done()]
        if steps:
            with self._parts.timers.stage("rollout_wait"):
                for step in sorted(steps):
                    self._collect(step, is_pushed_to_next=True)

    def after_push(self, version: int) -> None:
        """Samples anew what was lost with an engine, whose successor has got weights.

        Args:
            version: of the weights that were pushed.
        """
        self._version = version
        self._make_up()

    def drain(self) -> None:
        """Waits until no request is in flight, for who else needs the engines; comes after a push."""
        if self._running:
            with self._parts.timers.stage("rollout_wait"):
                for step in sorted(self._running):
                    self._collect(step, is_pushed_to_next=False)
            self._make_up()

    def close(self) -> None:
        """Ends what is still in flight, where a run ends before its time."""
        left = [sampling for sampling in self._running.values() if not sampling.future.done()]
        if left:
            self._parts.engine.abandon()
            for sampling in left:
                sampling.thread.join(CLOSE_PATIENCE_S)

    def state_dict(self) -> dict[str, Any]:
        """Responses that wait for their step, as tensors and plain values; call it after ``drain``."""
        assert not self._running, "drain comes first"
        engine = self._parts.engine
        return {
            "started": self._started,
            "ready": {step: to_plain(sampled, engine.fetch(sampled.rollouts)) for step, sampled in self._ready.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken."""
        self._started = state["started"]
        self._ready = {step: from_plain(plain, self._parts.engine.hold) for step, plain in state["ready"].items()}

    def _start(self, step: int) -> None:
        draw = _Replay(self._draw_alone)
        if self._ahead == 0:
            self._ready[step] = self._sample(draw, self._parts)
            return
        earlier = None
        if self._survives_push:
            draw.rewound()(self._config.data.prompts_per_step)  # now, in the order of the steps
        elif self._running:
            earlier = self._running[max(self._running)]
        timers = StageTimers()
        # an engine that dies now must wait for its weights until the trainer has some to give
        parts = dataclasses.replace(self._parts, timers=timers, engine=self._parts.engine.unattended(step=step))

        def sample() -> Sampled:
            if earlier is not None:
                earlier.thread.join()  # prompts are drawn in the order of the steps
            sampled = self._sample(draw, parts)
            seconds = {name.removeprefix("timing/").removesuffix("_s"): value for name, value in timers.take().items()}
            return dataclasses.replace(sampled, seconds=seconds)

        self._running[step] = _Sampling.begin(sample, draw=draw, name=f"sampling of step {step}")

    def _sample(self, draw: "_Replay", parts: StepParts) -> Sampled:
        config = self._config
        return sample_groups(
            draw.rewound(),
            parts,
            config.rollout,
            config.algorithm,
            num_prompts=config.data.prompts_per_step,
            seed=config.seed,
        )

    def _draw_alone(self, num: int) -> PromptBatch:
        with self._drawing:  # two steps may be in flight, and dynamic sampling draws for either
            return self._draw(num)

    def _make_up(self) -> None:
        for step in sorted(self._lost):
            self._ready[step] = self._sample(self._lost[step], self._parts)
            del self._lost[step]

    def _collect(self, step: int, *, is_pushed_to_next: bool) -> None:
        sampling = self._running[step]
        try:
            self._ready[step] = sampling.future.result()
        except EngineLostError as error:
            logger.warning("the responses of step %d are sampled again, from new weights: %s", step, error)
            if self._parts.engine.replace_lost() and not is_pushed_to_next:
                with self._parts.timers.stage("weight_sync"):
                    self._parts.weight_sync.push(version=self._version)
            self._lost[step] = sampling.draw
        del self._running[step]


class _Replay:
    """Draws prompts, and the same ones again when it is asked again."""

    def __init__(self, draw: DrawPrompts) -> None:
        self._draw = draw
        self._drawn: list[PromptBatch] = []

    def rewound(self) -> DrawPrompts:
        """From the first draw on."""
        position = 0

        def draw(num: int) -> PromptBatch:
            nonlocal position
            # dynamic sampling may ask for other numbers the second time: what was drawn for another one is used up
            while position < len(self._drawn):
                batch = self._drawn[position]
                position += 1
                if len(batch.problems) == num:
                    return batch
            self._drawn.append(self._draw(num))
            position += 1
            return self._drawn[-1]

        return draw


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampling:
    """Sampling on its way, in a thread that an ending process does not wait for."""

    future: Future[Sampled]
    thread: threading.Thread
    draw: _Replay

    @classmethod
    def begin(cls, sample: Callable[[], Sampled], *, draw: _Replay, name: str) -> "_Sampling":
        future: Future[Sampled] = Future()

        def run() -> None:
            try:
                future.set_result(sample())
            except BaseException as error:  # noqa: BLE001 - handed to whoever takes the result
                future.set_exception(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return cls(future=future, thread=thread, draw=draw)
