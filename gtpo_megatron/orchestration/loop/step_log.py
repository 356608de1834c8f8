"""Writes a step's row of metrics, and the texts of some of its groups."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem, RewardBatch, TrainBatch
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
        if load := self._stages.trainer.run_on_all("expert load", lambda actor: actor.balance.loads_by_layer())[0]:
            write_expert_load(
                self._run_folder, ExpertLoad(step=step, layers=list(load), tokens=[load[layer] for layer in load])
            )
        problems = dict(zip(sampled.prompts.group_ids, sampled.prompts.problems, strict=True))
        records = {
            whole_row: self._readable(part, row, sampled.rewards, whole_row, problems)
            for part in self._stages.trainer.rows_of_groups(sorted(chosen))
            for row, whole_row in enumerate(part.global_rows)
        }
        self._rollouts.write(step, [records[row] for row in sorted(records)])

    def _readable(
        self, batch: TrainBatch, row: int, rewards: RewardBatch, whole_row: int, problems: Mapping[int, Problem]
    ) -> RolloutRecord:
        """The response at ``row``, which is ``whole_row`` of the step's batch and of its rewards."""
        sampled, length = batch.rollouts, int(batch.rollouts.response_lengths[row])
        response_ids = sampled.response_ids[row, :length].tolist()
        problem = problems[int(sampled.group_ids[row])]
        decode = self._tokenizer.decode
        texts = {token: decode([token]) for token in set(response_ids)}  # a call takes microseconds
        return RolloutRecord(
            group_id=int(sampled.group_ids[row]),
            policy_version=int(sampled.oldest_versions[row]),
            prompt=decode(sampled.prompt_ids[row, : int(sampled.prompt_lengths[row])].tolist()),
            response=decode(response_ids),
            tokens=[texts[token] for token in response_ids],
            token_entropy=batch.token_entropy[row, :length].tolist(),
            shaped_rewards=batch.shaped_rewards[row, :length].tolist(),
            advantages=batch.advantages[row, :length].tolist(),
            branches=sampled.branches[row] if sampled.branches else (),
            foreign_spans=foreign_spans(sampled.loss_mask[row, :length].tolist()),
            reward=float(rewards.rewards[whole_row]),
            truncated=bool(sampled.truncated[row]),
            reward_failed=bool(rewards.failed[whole_row]),
            answer=problem.answer,
            problem_id=problem.problem_id,
            parts={name: float(part[whole_row]) for name, part in rewards.parts.items()},
            info=rewards.info[whole_row] if rewards.info else "",
        )
