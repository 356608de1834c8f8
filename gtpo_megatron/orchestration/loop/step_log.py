"""Writes a step's row of metrics, and the texts of some of its groups."""

from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem, RewardBatch, TokenRecord
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.orchestration.loop.sampling import SampledStep
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord, foreign_spans
from gtpo_megatron.run_folder.token_files import ExpertLoad, write_expert_load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StepLog:
    """Writes metrics and sampled texts.

    Args:
        config: number of texts that are written.
        run_folder: destination of texts and loads of experts.
        tokenizer: converts tokens to text.
        stages: the timers, and the trainer, which holds entropies and credit.
        sinks: receivers of the metrics.
        display: lines or panel on the terminal.
    """

    def __init__(
        self,
        config: LoggingConfig,
        run_folder: Path,
        tokenizer: "PreTrainedTokenizerBase",
        stages: Stages,
        sinks: MetricSinks,
        display: TrainingDisplay,
    ) -> None:
        self._run_folder = run_folder
        self._tokenizer = tokenizer
        self._stages = stages
        self._sinks = sinks
        self._display = display
        self._rollouts = RolloutLog(
            run_folder, groups_per_step=config.rollout_groups_per_step, every_steps=config.rollout_every_steps
        )

    def truncate_after(self, step: int) -> None:
        """Drops the texts of later steps, which a resumed run makes again."""
        self._rollouts.truncate_after(step)

    def row(self, scalars: dict[str, float]) -> dict[str, float]:
        """A row of metrics: ``scalars`` and the times since the last row."""
        scalars = scalars | self._stages.timers.take()
        seconds = scalars.get("timing/step_s")
        if seconds:
            scalars["throughput/tokens_per_s"] = scalars["rollout/response_tokens_count"] / seconds
        return scalars

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes the row of a step, times included."""
        self.write_row(step, self.row(scalars))

    def write_row(self, step: int, row: dict[str, float]) -> None:
        """Writes a row that :meth:`row` made."""
        self._sinks.write(step, row)
        self._display.step_done(step, row)

    def write_rollouts(self, step: int, sampled: SampledStep) -> None:
        """Writes the texts of some groups with their rewards, entropies and credit, if the step is due for it.

        At the same steps the loads of experts, if the model has them.
        """
        groups = sampled.rollouts.group_ids.tolist()
        rewards = sampled.rewards.rewards.tolist()
        chosen = set(self._rollouts.choose(step, group_ids=groups, rewards=rewards))
        if not chosen:
            return
        if load := self._stages.trainer.expert_load():
            write_expert_load(
                self._run_folder, ExpertLoad(step=step, layers=list(load), tokens=[load[layer] for layer in load])
            )
        rows = [row for row, group in enumerate(groups) if group in chosen]
        records = self._stages.trainer.sample_records(sorted(chosen))
        problems = dict(zip(sampled.prompts.group_ids, sampled.prompts.problems, strict=True))
        self._rollouts.write(
            step,
            [
                self._readable(record, sampled.rewards, row, problems[record.group_id])
                for record, row in zip(records, rows, strict=True)
            ],
        )

    def _readable(self, record: TokenRecord, rewards: RewardBatch, row: int, problem: Problem) -> RolloutRecord:
        decode = self._tokenizer.decode
        texts = {token: decode([token]) for token in set(record.response_ids)}  # a call takes microseconds
        return RolloutRecord(
            group_id=record.group_id,
            policy_version=record.policy_version,
            prompt=decode(record.prompt_ids),
            response=decode(record.response_ids),
            tokens=[texts[token] for token in record.response_ids],
            token_entropy=record.token_entropy,
            shaped_rewards=record.shaped_rewards,
            advantages=record.advantages,
            foreign_spans=foreign_spans(record.loss_mask),
            reward=float(rewards.rewards[row]),
            truncated=record.truncated,
            reward_failed=bool(rewards.failed[row]),
            answer=problem.answer,
            problem_id=problem.problem_id,
            parts={name: float(part[row]) for name, part in rewards.parts.items()},
            info=rewards.info[row] if rewards.info else "",
        )
