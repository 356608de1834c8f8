"""The loop of a warm start: conversations in, one update a step, the held-out loss, checkpoints."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.conversations.demonstrations import demonstration_batch
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.observability.memory import PeakMemory
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.orchestration.loop.sft_inputs import SftInputs
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.run_folder.checkpoints import Checkpoint, CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import RunFacts

logger = logging.getLogger(__name__)

HELDOUT_LOSS = "sft/heldout_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class SftSummary:
    """The held-out loss before the first step and after the last, nats per token.

    Attributes:
        before: None where nothing is held out, or a resumed run did not measure it.
        after: likewise; None where the run was stopped before its end.
        stopped_after: the step that it was asked to stop at, and is saved at; 0 before the first; None at the end.
        stop_reason: sender and kind of the request.
    """

    before: float | None = None
    after: float | None = None
    stopped_after: int | None = None
    stop_reason: str = ""


class SupervisedLoop:
    """Drives a warm start over its ranks; knows neither Ray nor Megatron.

    Args:
        config: configuration of the warm start.
        checkpoints: its checkpoints.
        facts: facts for their manifests.
        inputs: read and checked.
        trainer: the ranks.
        timers: timers of the steps.
        sinks: receivers of the metrics.
        display: lines or panel on the terminal.
        stop_reason: asked after every step; anything but an empty string saves the run there and ends it.
    """

    def __init__(  # noqa: PLR0913 - as the controller's, less what it has in its stages
        self,
        config: SftConfig,
        checkpoints: CheckpointFolder,
        facts: RunFacts,
        inputs: SftInputs,
        trainer: Trainer,
        timers: StageTimers,
        sinks: MetricSinks,
        display: TrainingDisplay,
        *,
        stop_reason: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._timers = timers
        self._sinks = sinks
        self._display = display
        self._stop_reason = stop_reason
        self._sampler = PromptSampler(inputs.train, config.seed)
        self._heldout = demonstration_batch(inputs.heldout) if inputs.heldout else None
        self._counters = {"rows": 0, "tokens": 0}
        self._saver = CheckpointSaver(config.checkpoint, checkpoints, facts, trainer)

    def run(self, checkpoint: Checkpoint | None) -> SftSummary:
        """All steps from the start, or from a checkpoint.

        Raises:
            GTPOError: of the stage that failed; the last checkpoint stays valid.
        """
        first = self._restore(checkpoint) if checkpoint else 0
        last, before = self._config.num_steps, None
        with PeakMemory(stage=lambda: self._timers.current) as memory, self._saver:
            if checkpoint is None:
                self._display.starting("step 0: measuring the held-out loss" if self._heldout is not None else "")
                scores = self._measure()
                before = scores.get(HELDOUT_LOSS)
                self._write(0, scores | memory.take())
            self._display.starting("")
            for step in range(first + 1, last + 1):
                scalars = self._step(step)
                scores = self._measure() if self._is_due(step, self._config.heldout_every_steps) else {}
                # the row first, as in any run: a row without its checkpoint is written again
                self._write(step, scalars | scores | memory.take())
                self._saver.poll()
                asked = "" if step == last else self._stop_reason()
                if asked or self._is_due(step, self._config.checkpoint.every_steps):
                    self._save(step, scores)
                    asked = asked or ("" if step == last else self._stop_reason())
                if asked:
                    logger.info("asked to stop (%s): the warm start stands after step %d of %d", asked, step, last)
                    return SftSummary(before=before, stopped_after=step, stop_reason=asked)
            if first >= last:  # resumed when everything was done
                scores = self._measure()
            return SftSummary(before=before, after=scores.get(HELDOUT_LOSS))

    def _step(self, step: int) -> dict[str, float]:
        with self._timers.stage("step"):
            batch = demonstration_batch(self._sampler.next(self._config.data.rows_per_step))
            with self._timers.stage("update"):
                metrics = self._trainer.fit(batch, step=step)
        return to_scalars(metrics) | self._count(batch)

    def _count(self, batch: RolloutBatch) -> dict[str, float]:
        trained, read = int(batch.own_lengths.sum()), int(batch.sequence_tokens.sum())
        self._counters["rows"] += batch.num_responses
        self._counters["tokens"] += trained
        return {"sft/trained_tokens_count": float(trained), "sft/tokens_count": float(read)}

    def _measure(self) -> dict[str, float]:
        if self._heldout is None:
            return {}
        with self._timers.stage("evaluation"):
            return to_scalars(self._trainer.heldout_loss(self._heldout))

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        row = scalars | self._timers.take()
        if seconds := row.get("timing/step_s"):
            row["throughput/tokens_per_s"] = row["sft/tokens_count"] / seconds
        self._sinks.write(step, row)
        self._display.step_done(step, row)

    def _save(self, step: int, scores: dict[str, float]) -> None:
        state = DriverState(
            step=step, sampler=dict(self._sampler.state_dict()), counters=dict(self._counters), mismatch={}
        )
        with self._timers.stage("checkpoint"):
            self._saver.save(state, scores)

    def _restore(self, checkpoint: Checkpoint) -> int:
        self._display.starting("reading the checkpoint")
        self._saver.restore(checkpoint)
        self._sampler.load_state_dict(checkpoint.state.sampler)
        self._counters = dict(checkpoint.state.counters)
        logger.info("resumed after step %d from %s", checkpoint.state.step, checkpoint.path)
        return checkpoint.state.step

    def _is_due(self, step: int, every_steps: int) -> bool:
        return step == self._config.num_steps or (every_steps > 0 and step % every_steps == 0)
