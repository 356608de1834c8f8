"""The run: prompts in, steps, measurements, checkpoints, and what is left when it ends."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, TokenRecord
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.evaluation.evaluator import HeldOutResult, HeldOutSet, evaluate
from gtpo_megatron.observability.memory import PeakMemory
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.orchestration.loop.pipeline import RolloutPipeline
from gtpo_megatron.orchestration.loop.policy_check import check_gap, check_version
from gtpo_megatron.orchestration.loop.training_step import StepReport, training_step
from gtpo_megatron.orchestration.stages.protocols import Metrics, StepParts
from gtpo_megatron.run_folder.checkpoints import UNMEASURED_FILE, Checkpoint, DriverState
from gtpo_megatron.run_folder.data_file import DataContent
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.manifest import RunFacts
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord, foreign_spans
from gtpo_megatron.weights.megatron.restricted_pickle import load_torch

logger = logging.getLogger(__name__)

ROLLOUTS_FILE = "rollouts.pt"
"""In a checkpoint: responses that were sampled ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What a run works on, read and checked before any process starts.

    Attributes:
        tokenizer: of the model.
        train: problems to learn from.
        heldout: sets to measure on.
        notes: what was noticed while reading, for the person who starts the run.
        contents: of every data set, by its name in ``data.json``.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Problem]
    heldout: Sequence[HeldOutSet]
    notes: Sequence[str] = ()
    contents: Mapping[str, DataContent] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Accuracy on every held-out set before the first step and after the last.

    Attributes:
        before: None where a resumed run did not measure it.
        after: None where a run was stopped before its end.
        stopped_after: the step that a run was asked to stop at, and is saved at; 0 where nothing was to be saved yet;
            None at the end.
        stop_reason: who asked, and how.
        report: the page on the run; None before it is written, or where it could not be.
    """

    before: tuple[HeldOutResult, ...] | None
    after: tuple[HeldOutResult, ...] | None
    stopped_after: int | None = None
    stop_reason: str = ""
    report: Path | None = None


class Controller:
    """Drives a run over its parts; knows neither Ray nor Megatron.

    Args:
        config: of the run.
        folder: of the run, already opened.
        facts: for the checkpoints' manifests.
        inputs: read and checked.
        parts: who does the work.
        sinks: where the numbers go.
        display: what a person sees.
        stop_reason: asked after every step and before every held-out set; anything but an empty string saves the run
            there and ends it.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        facts: RunFacts,
        inputs: RunInputs,
        parts: StepParts,
        sinks: MetricSinks,
        display: TrainingDisplay,
        *,
        stop_reason: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._parts = parts
        self._sinks = sinks
        self._display = display
        self._stop_reason = stop_reason
        self._asked = ""
        self._sampler = PromptSampler(inputs.train, config.seed)
        self._counters = {"groups": 0, "responses": 0, "response_tokens": 0, "reward_failed": 0}
        self._saver = CheckpointSaver(config.checkpoint, folder.checkpoints, facts, parts.actor)
        self._pipeline = RolloutPipeline(self._draw, parts, config)
        self._rollout_log = RolloutLog(
            folder.path,
            groups_per_step=config.logging.rollout_groups_per_step,
            every_steps=config.logging.rollout_every_steps,
        )

    def run(self, checkpoint: Checkpoint | None) -> RunSummary:
        """All steps from the start, or from a checkpoint.

        Raises:
            GTPOError: of the stage that failed; the last checkpoint stays valid.
        """
        self._parts.turns.to_trainer()  # an awake engine leaves no room for a checkpoint
        first = self._restore(checkpoint) if checkpoint else 0
        self._pipeline.begin_at(first + 1)
        with ExitStack() as stack:
            stack.callback(self._pipeline.close)
            memory = stack.enter_context(PeakMemory(stage=lambda: self._parts.timers.current))
            stack.enter_context(self._saver)  # a run that ends well ends with its last checkpoint whole
            self._parts.turns.to_push()
            with self._parts.timers.stage("weight_sync"):
                self._parts.weight_sync.push(version=first)
            self._parts.turns.to_engine()
            before = after = None
            if checkpoint is None or checkpoint.unmeasured is not None:
                after = self._measure_at_start(checkpoint, memory)
                if after is None:
                    return self._stopped(first)  # nothing is lost: the next start begins here too
                before = after if checkpoint is None else None
            for step in range(first + 1, self._config.num_steps + 1):
                scalars = self._step(step)
                scores: dict[str, float] = {}
                if self._is_due(step, self._config.evaluation.every_steps):
                    after = self._measure()
                    if after is None:
                        self._save(step, scores, unmeasured=self._row(scalars | memory.take()))
                        return self._stopped(step, before=before)
                    scores = _metrics(after)
                # the row first: a checkpoint without its row would leave a gap in the metrics for good, while a row
                # without its checkpoint is written again
                self._write(step, scalars | scores | memory.take())
                self._saver.poll()
                is_asked = step < self._config.num_steps and self._is_asked_to_stop()
                if is_asked or self._is_due(step, self._config.checkpoint.every_steps):
                    self._save(step, scores)
                if is_asked:
                    return self._stopped(step, before=before)
            if after is None:  # resumed when everything was done
                after = self._measure()
                if after is None:
                    return self._stopped(first)
            return RunSummary(before=before, after=after)

    def _measure_at_start(self, checkpoint: Checkpoint | None, memory: PeakMemory) -> tuple[HeldOutResult, ...] | None:
        """Before the first step, or after that of a checkpoint, whose measurement a stop has put off."""
        if checkpoint is not None:
            self._parts.timers.take()  # the times of this start are not the step's
        results = self._measure()
        if results is None:
            return None
        if checkpoint is not None:
            row = (checkpoint.unmeasured or {}) | self._parts.timers.take() | _metrics(results)
            self._write_row(checkpoint.state.step, row)
            self._saver.settle(checkpoint, _metrics(results))
        else:
            contaminated = {
                f"eval/{heldout.label}_contaminated_count": float(heldout.num_contaminated)
                for heldout in self._inputs.heldout
            }
            self._write(0, _metrics(results) | contaminated | memory.take())
        return results

    def _is_asked_to_stop(self) -> bool:
        self._asked = self._stop_reason()
        return bool(self._asked)

    def _stopped(self, step: int, *, before: tuple[HeldOutResult, ...] | None = None) -> RunSummary:
        logger.info("asked to stop (%s): the run stands after step %d of %d", self._asked, step, self._config.num_steps)
        return RunSummary(before=before, after=None, stopped_after=step, stop_reason=self._asked)

    def _step(self, step: int) -> dict[str, float]:
        with self._parts.timers.stage("step"):
            report = training_step(self._pipeline, self._parts, self._config, step=step)
        self._log_rollouts(step, report)
        gap = self._check_push(report.sampled.prompts, step)  # scores responses of its own, in place of the step's
        self._parts.actor.release_batch()
        scalars = to_scalars(report.metrics | gap) | {
            "sync/policy_version": float(step),
            "health/engine_restarts_count": float(self._parts.engine.num_restarts),
        }
        for counter in ("responses", "response_tokens", "reward_failed"):
            self._counters[counter] += int(scalars[f"rollout/{counter}_count"])
        if failed := int(scalars["rollout/reward_failed_count"]):
            self._display.note(
                f"step {step}: {failed} of {int(scalars['rollout/responses_count'])} responses have no verdict and "
                f"take no part; log.txt says why"
            )
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
        with self._parts.timers.stage("push_check"):
            probe = self._parts.engine.generate(
                prompts, self._config.rollout.sampling, samples_per_prompt=1, seed=self._config.seed
            )
            scores = self._parts.actor.score_tokens(probe)
            self._parts.engine.forget_prefixes()  # a resumed run does not check again
        check_version(probe, version=step)
        check_gap(scores, version=step, limit=self._parts.logprob_gap_limit)
        names = ("sync/logprob_gap_max", "sync/logprob_gap_mean") if is_stale else ()
        return {name: scores[name] for name in names}

    # ------------------------------------------------------------------------------------------------ measuring, saving
    def _measure(self) -> tuple[HeldOutResult, ...] | None:
        """Accuracy on every held-out set; None where the run was asked to stop before the last of them was begun.

        All sets together can take far longer than a batch system warns before it ends a job.
        """
        config = self._config.evaluation
        threshold = self._config.algorithm.success_threshold

        def sample_and_grade(prompts: PromptBatch) -> RewardBatch:
            rollouts = self._parts.engine.generate(
                prompts, config.sampling, samples_per_prompt=config.samples, seed=config.seed
            )
            return self._parts.reward.score(rollouts, prompts)

        self._pipeline.drain()  # it empties the prefix cache, which nothing in flight may be using
        results: list[HeldOutResult] = []
        with self._parts.timers.stage("evaluation"):
            for heldout in self._inputs.heldout:
                if self._is_asked_to_stop():
                    return None
                results.append(evaluate(heldout, config, sample_and_grade, threshold=threshold))
            # a resumed run does not measure again, so a measurement must leave no trace in the sampler
            self._parts.engine.forget_prefixes()
        for result in results:
            self._display.note(str(result))
            if result.num_failed:
                self._display.note(f"{result.num_failed} {result.label} responses have no verdict and count as wrong")
        return tuple(results)

    def _save(self, step: int, scores: dict[str, float], *, unmeasured: dict[str, float] | None = None) -> None:
        def write_more(folder: Path) -> None:
            self._write_rollouts(folder)
            if unmeasured is not None:
                write_file(folder / UNMEASURED_FILE, json.dumps(unmeasured))

        self._pipeline.drain()  # a checkpoint holds whole responses only, so that none is lost or sampled twice
        with self._parts.timers.stage("checkpoint"):
            state = DriverState(step=step, sampler=dict(self._sampler.state_dict()), counters=dict(self._counters))
            self._parts.turns.to_trainer(keep_weights=True)
            self._saver.save(state, scores, write_more=write_more)
            self._parts.turns.to_push()
            self._parts.turns.to_engine()

    def _write_rollouts(self, folder: Path) -> None:
        """Adds what was sampled ahead to a checkpoint."""
        if self._config.rollout.max_staleness:
            torch.save(self._pipeline.state_dict(), folder / ROLLOUTS_FILE)

    def _restore(self, checkpoint: Checkpoint) -> int:
        self._display.stage("checkpoint")
        self._saver.restore(checkpoint)
        state = checkpoint.state
        self._sampler.load_state_dict(state.sampler)
        self._counters = dict(state.counters)
        if self._config.rollout.max_staleness:
            self._pipeline.load_state_dict(load_torch(checkpoint.path / ROLLOUTS_FILE))
        self._rollout_log.truncate_after(state.step)
        logger.info("resumed after step %d from %s", state.step, checkpoint.path)
        return state.step

    def _is_due(self, step: int, every_steps: int) -> bool:
        return step == self._config.num_steps or (every_steps > 0 and step % every_steps == 0)

    # ----------------------------------------------------------------------------------------------------- writing down
    def _write(self, step: int, scalars: dict[str, float]) -> None:
        self._write_row(step, self._row(scalars))

    def _row(self, scalars: dict[str, float]) -> dict[str, float]:
        """With the times of the step."""
        scalars = scalars | self._parts.timers.take()
        seconds = scalars.get("timing/step_s")
        if seconds:
            scalars["throughput/tokens_per_s"] = scalars["rollout/response_tokens_count"] / seconds
        return scalars

    def _write_row(self, step: int, row: dict[str, float]) -> None:
        self._sinks.write(step, row)
        self._display.step_done(step, row)

    def _log_rollouts(self, step: int, report: StepReport) -> None:
        sampled = report.sampled
        groups = sampled.rollouts.group_ids.tolist()
        rewards = sampled.rewards.rewards.tolist()
        chosen = set(self._rollout_log.choose(step, group_ids=groups, rewards=rewards))
        if not chosen:
            return
        rows = [row for row, group in enumerate(groups) if group in chosen]
        records = self._parts.actor.sample_records(sorted(chosen))
        answers = {
            group: problem.answer
            for group, problem in zip(sampled.prompts.group_ids, sampled.prompts.problems, strict=True)
        }
        self._rollout_log.write(
            step,
            [
                self._readable(record, rewards[row], bool(sampled.rewards.failed[row]), answers[record.group_id])
                for record, row in zip(records, rows, strict=True)
            ],
        )

    def _readable(self, record: TokenRecord, reward: float, reward_failed: bool, answer: str) -> RolloutRecord:
        tokenizer = self._inputs.tokenizer
        texts = {token: tokenizer.decode([token]) for token in set(record.response_ids)}  # a call takes microseconds
        return RolloutRecord(
            group_id=record.group_id,
            policy_version=record.policy_version,
            prompt=tokenizer.decode(record.prompt_ids),
            response=tokenizer.decode(record.response_ids),
            tokens=[texts[token] for token in record.response_ids],
            token_entropy=record.token_entropy,
            shaped_rewards=record.shaped_rewards,
            advantages=record.advantages,
            foreign_spans=foreign_spans(record.loss_mask),
            reward=reward,
            truncated=record.truncated,
            reward_failed=reward_failed,
            answer=answer,
        )


def _metrics(results: Iterable[HeldOutResult]) -> dict[str, float]:
    """Of all sets."""
    return {name: value for result in results for name, value in result.metrics().items()}
