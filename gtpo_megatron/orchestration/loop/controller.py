"""The run: prompts in, steps, measurements, checkpoints, and what is left when it ends."""

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.batch import PromptBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.evaluation.evaluator import HeldOutResult
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import PREFIX
from gtpo_megatron.observability.memory import PeakMemory
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.orchestration.loop.heldout_measurement import HeldOutMeasurement
from gtpo_megatron.orchestration.loop.inputs import RunInputs, prompt_sampler
from gtpo_megatron.orchestration.loop.pipeline import rollout_pipeline
from gtpo_megatron.orchestration.loop.policy_check import MismatchCheck, check_version
from gtpo_megatron.orchestration.loop.step_log import StepLog
from gtpo_megatron.orchestration.loop.training_step import training_step
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.orchestration.stages.trainer import Metrics
from gtpo_megatron.run_folder.checkpoints import UNMEASURED_FILE, Checkpoint, DriverState
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.manifest import RunFacts
from gtpo_megatron.weights.config_json import read_architecture

logger = logging.getLogger(__name__)

ROLLOUTS_FILE = "rollouts.pt"
"""In a checkpoint: responses that were sampled ahead, and prompts of those that were not whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Accuracy on every held-out set before the first step and after the last.

    Attributes:
        before: None where a resumed run did not measure it.
        after: None where a run was stopped before its end.
        stopped_after: the step that a run was asked to stop at, and is saved at; 0 where nothing was to be saved yet;
            None at the end.
        stop_reason: sender and kind of the request.
    """

    before: tuple[HeldOutResult, ...] | None
    after: tuple[HeldOutResult, ...] | None
    stopped_after: int | None = None
    stop_reason: str = ""


class Controller:
    """Drives a run over its stages; knows neither Ray nor Megatron.

    Args:
        config: configuration of the run.
        folder: folder of the run, already opened.
        facts: facts for the checkpoints' manifests.
        inputs: read and checked.
        stages: the stages of a step.
        sinks: receivers of the metrics.
        display: lines or panel on the terminal.
        stop_reason: asked after every step and before every held-out set; anything but an empty string saves the run
            there and ends it.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        facts: RunFacts,
        inputs: RunInputs,
        stages: Stages,
        sinks: MetricSinks,
        display: TrainingDisplay,
        *,
        stop_reason: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._stages = stages
        self._display = display
        self._stop_reason = stop_reason
        self._asked = ""
        self._sampler = prompt_sampler(config, inputs)
        self._counters = {"groups": 0, "responses": 0, "response_tokens": 0, "reward_failed": 0}
        experts = read_architecture(Path(config.model.path)).experts
        self._gate = MismatchGate.of_run(config, has_experts=experts is not None)
        self._mismatch = MismatchCheck(
            self._gate,
            stages.trainer,
            folder.path,
            inputs.tokenizer,
            verify_every_steps=config.weight_sync.verify_every_steps,
        )
        self._saver = CheckpointSaver(config.checkpoint, folder.checkpoints, facts, stages.trainer)
        self._pipeline = rollout_pipeline(self._draw, stages, config, self._sampler.note)
        self._log = StepLog(config.logging, folder.path, inputs.tokenizer, stages, sinks, display)
        self._heldout = HeldOutMeasurement(
            config, inputs.heldout, stages, self._pipeline, display, is_asked_to_stop=self._is_asked_to_stop
        )

    def run(self, checkpoint: Checkpoint | None) -> RunSummary:
        """All steps from the start, or from a checkpoint.

        Raises:
            GTPOError: of the stage that failed; the last checkpoint stays valid.
        """
        self._stages.memory_sharing.to_trainer()  # an awake engine leaves no room for a checkpoint
        self._pipeline.begin_at(checkpoint.state.step + 1 if checkpoint else 1)
        first = self._restore(checkpoint) if checkpoint else 0
        with ExitStack() as stack:
            stack.callback(self._pipeline.close)
            memory = stack.enter_context(PeakMemory(stage=lambda: self._stages.timers.current))
            stack.enter_context(self._saver)  # a run that ends well ends with its last checkpoint whole
            self._stages.memory_sharing.to_push()
            self._display.starting("first push of the weights into the engines")
            with self._stages.timers.stage("weight_sync"):
                self._stages.weight_sync.push(version=first)
            self._stages.memory_sharing.to_engine()
            after = self._measure_at_start(checkpoint, memory)
            if after is None:
                return self._stopped(first)  # nothing is lost: the next start begins here too
            before = (after or None) if checkpoint is None else None
            self._display.starting("")
            for step in range(first + 1, self._config.num_steps + 1):
                scalars = self._step(step)
                scores: dict[str, float] = {}
                if self._is_due(step, self._config.evaluation.every_steps):
                    after = self._heldout.measure()
                    if after is None:
                        self._save(step, scores, unmeasured=self._log.row(scalars | memory.take()))
                        return self._stopped(step, before=before)
                    scores = _metrics(after)
                # the row first: a checkpoint without its row would leave a gap in the metrics for good, while a row
                # without its checkpoint is written again
                self._log.write(step, scalars | scores | memory.take())
                self._saver.poll()
                is_last = step == self._config.num_steps
                is_asked = not is_last and self._is_asked_to_stop()
                if is_asked or self._is_due(step, self._config.checkpoint.every_steps):
                    self._save(step, scores)
                    # a request during the save is met by it: another step could be longer than a batch system waits
                    is_asked = is_asked or (not is_last and self._is_asked_to_stop())
                if is_asked:
                    return self._stopped(step, before=before)
            if not after:  # resumed when everything was done
                after = self._heldout.measure()
                if after is None:
                    return self._stopped(first)
            return RunSummary(before=before, after=after)

    def _measure_at_start(self, checkpoint: Checkpoint | None, memory: PeakMemory) -> tuple[HeldOutResult, ...] | None:
        """Before the first step, or after that of a checkpoint, whose measurement a stop has put off.

        Returns:
            What was measured, nothing if nothing was due; None where the run was asked to stop.
        """
        if checkpoint is None and not self._config.evaluation.at_start:
            self._log.write(0, self._heldout.contamination() | memory.take())
            return ()
        if checkpoint is not None and checkpoint.unmeasured is None:
            return ()
        if checkpoint is not None:
            self._stages.timers.take()  # the times of this start are not the step's
        step = checkpoint.state.step if checkpoint else 0
        when = "before training" if checkpoint is None else "which a stop had put off"
        self._display.starting(f"step {step}: measuring {self._heldout.size} {when}")
        results = self._heldout.measure()
        if results is None:
            return None
        if checkpoint is not None:
            row = (checkpoint.unmeasured or {}) | self._stages.timers.take() | _metrics(results)
            self._log.write_row(checkpoint.state.step, row)
            self._saver.record_measurement(checkpoint, _metrics(results))
        else:
            self._log.write(0, _metrics(results) | self._heldout.contamination() | memory.take())
        return results

    def _is_asked_to_stop(self) -> bool:
        self._asked = self._stop_reason()
        return bool(self._asked)

    def _stopped(self, step: int, *, before: tuple[HeldOutResult, ...] | None = None) -> RunSummary:
        logger.info("asked to stop (%s): the run stands after step %d of %d", self._asked, step, self._config.num_steps)
        return RunSummary(before=before, after=None, stopped_after=step, stop_reason=self._asked)

    def _step(self, step: int) -> dict[str, float]:
        with self._stages.timers.stage("step"):
            report = training_step(self._pipeline, self._stages, self._config, self._mismatch, step=step)
        self._log.write_rollouts(step, report.sampled)
        gap = self._check_push(report.sampled.prompts, step)  # scores responses of its own, in place of the step's
        self._stages.trainer.run_on_all("release", lambda actor: actor.release_batch())
        scalars = to_scalars(report.metrics | gap) | {
            "sync/policy_version": float(step),
            "health/engine_restarts_count": float(self._stages.engine.num_restarts),
            **self._sampler.metrics(),
        }
        for counter in ("responses", "response_tokens", "reward_failed"):
            self._counters[counter] += int(scalars[f"rollout/{counter}_count"])
        if failed := int(scalars["rollout/reward_failed_count"]):
            self._display.note(
                f"step {step}: {failed} of {int(scalars['rollout/responses_count'])} responses have no verdict and "
                f"take no part: {report.sampled.rewards.commonest_failure or 'log.txt says why'}"
            )
        if refused := int(scalars.get("rollout/responses_refused_count", 0)):
            self._display.note(f"step {step}: requests of agents were refused in {refused} episodes; log.txt says why")
        return scalars

    def _draw(self, num: int) -> PromptBatch:
        first = self._counters["groups"]
        self._counters["groups"] += num
        return PromptBatch(problems=self._sampler.next(num), group_ids=tuple(range(first, first + num)))

    def _check_push(self, prompts: PromptBatch, step: int) -> Metrics:
        """Every push is checked by the next step's responses, unless there are none or they are of older weights.

        Then one response a prompt is sampled for nothing else: after the last push, and after every so many where
        responses are stale.
        """
        is_last = step == self._config.num_steps
        is_stale = self._config.rollout.max_staleness > 0
        if not (is_last or (is_stale and step % self._config.weight_sync.verify_every_steps == 0)):
            return {}
        self._pipeline.drain()  # the check empties the prefix cache, which nothing in flight may be using
        with self._stages.timers.stage("push_check"):
            probe = self._stages.engine.generate(
                prompts, self._config.rollout.sampling, samples_per_prompt=1, seed=self._config.seed
            )
            scores = self._stages.trainer.score_tokens(probe)
            self._stages.engine.forget_prefixes()  # a resumed run does not check again
        check_version(probe, version=step)
        scores |= self._mismatch.check(scores, probe, version=step)
        return {name: scores[name] for name in scores if is_stale and name.startswith(PREFIX)}

    def _save(self, step: int, scores: dict[str, float], *, unmeasured: dict[str, float] | None = None) -> None:
        with self._pipeline.frozen() as rollouts_state:
            state = DriverState(
                step=step,
                sampler=dict(self._sampler.state_dict()),
                counters=dict(self._counters),
                mismatch=self._gate.state_dict(),
            )

        def write_more(folder: Path) -> None:
            if self._config.rollout.is_kept_between_steps:
                torch.save(rollouts_state(), folder / ROLLOUTS_FILE)
            if unmeasured is not None:
                write_file(folder / UNMEASURED_FILE, json.dumps(unmeasured))

        with self._stages.timers.stage("checkpoint"):
            self._stages.memory_sharing.to_trainer(keep_weights=True)
            self._saver.save(state, scores, write_more=write_more)
            self._stages.memory_sharing.to_push()
            self._stages.memory_sharing.to_engine()

    def _restore(self, checkpoint: Checkpoint) -> int:
        self._display.starting("reading the checkpoint")
        self._saver.restore(checkpoint)
        state = checkpoint.state
        self._sampler.load_state_dict(state.sampler)
        self._counters = dict(state.counters)
        self._gate.load_state_dict(state.mismatch)
        if self._config.rollout.is_kept_between_steps:
            from gtpo_megatron.weights.megatron.restricted_pickle import load_torch

            self._pipeline.load_state_dict(load_torch(checkpoint.path / ROLLOUTS_FILE), step=state.step)
        self._log.truncate_after(state.step)
        logger.info("resumed after step %d from %s", state.step, checkpoint.path)
        return state.step

    def _is_due(self, step: int, every_steps: int) -> bool:
        return step == self._config.num_steps or (every_steps > 0 and step % every_steps == 0)


def _metrics(results: Iterable[HeldOutResult]) -> dict[str, float]:
    """Of all sets."""
    return {name: value for result in results for name, value in result.metrics().items()}
