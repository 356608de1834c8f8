"""(3) Decodes responses and grades them."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.conversations.graded_text import GradedText
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import ShapeError
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.rewards.request import RewardRequest, Verdict
from gtpo_megatron.rewards.reward_pool import RewardPool

logger = logging.getLogger(__name__)

GRADING_SHARE = 0.75
"""Fraction of the stage's deadline after which rows without a verdict count as failed."""


class RewardGrader:
    """Decodes responses and grades them as answers to their problems.

    Args:
        tokenizer: tokenizer of the model.
        pool: the pool that grades; closed with this.
        budget_s: seconds for a batch, see ``RewardPool.grade``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pool: RewardPool, *, budget_s: float | None = None) -> None:
        self._text = GradedText(tokenizer)
        self._pool = pool
        self._budget_s = budget_s

    def grade(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """Grades every response, with a few groups' tokens in memory at a time.

        Raises:
            ShapeError: the group of a response is not among the prompts.
            WorkerError: a worker cannot be restarted.
        """
        problems = dict(zip(prompts.group_ids, prompts.problems, strict=True))
        requests: dict[int, RewardRequest] = {}
        for indices, group in rollouts.in_turn():
            requests.update(zip(indices, self._requests(group, problems), strict=True))
        in_order = [requests[index] for index in sorted(requests)]
        return reward_batch(self._pool.grade(in_order, budget_s=self._budget_s))

    def close(self) -> None:
        """Ends the grading processes."""
        self._pool.close()

    def _requests(self, rollouts: RolloutBatch, problems: Mapping[int, Problem]) -> list[RewardRequest]:
        lengths, groups = rollouts.response_lengths.tolist(), rollouts.group_ids.tolist()
        if unknown := [group for group in groups if group not in problems]:
            raise ShapeError(f"responses of group {unknown[0]} have no prompt in this batch of {len(problems)}")
        opens = {group: self._text.opens_thinking(problems[group].prompt_ids) for group in set(groups)}
        ids = [row[:length].tolist() for row, length in zip(rollouts.response_ids, lengths, strict=True)]
        columns = (rollouts.truncated.tolist(), rollouts.prompt_lengths.tolist())
        return [
            RewardRequest(
                response=text,
                answer=problems[group].answer,
                prompt=problems[group].prompt,
                columns_json=problems[group].columns_json,
                ended="length" if is_truncated else "stop",
                opens_thinking=opens[group],
                num_prompt_tokens=num_prompt_tokens,
                num_response_tokens=length,
            )
            for text, length, group, is_truncated, num_prompt_tokens in zip(
                self._text.decode(ids), lengths, groups, *columns, strict=True
            )
        ]


def build_grader(config: RunConfig, run_folder: Path | None) -> RewardGrader:
    """Builds the grader of a run; its folder has the file of the judge's answers."""
    pool = RewardPool(
        config.reward,
        folder=run_folder,
        responses_per_step=config.data.prompts_per_step * config.rollout.group_size,
    )
    budget_s = GRADING_SHARE * config.cluster.stage_deadline_s
    return RewardGrader(load_tokenizer(config.model.path), pool, budget_s=budget_s)


def reward_batch(verdicts: Sequence[Verdict]) -> RewardBatch:
    """The verdicts on ``B`` responses as rewards ``[B]``, 0 without one; logs why some have none."""
    names = sorted({name for verdict in verdicts for name in verdict.parts})
    return RewardBatch(
        rewards=torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32),
        failed=torch.tensor([verdict.failure is not None for verdict in verdicts], dtype=torch.bool),
        num_over_budget=sum(verdict.kind == "over_budget" for verdict in verdicts),
        parts={
            name: torch.tensor([verdict.parts.get(name, torch.nan) for verdict in verdicts], dtype=torch.float32)
            for name in names
        },
        info=tuple(verdict.info for verdict in verdicts) if any(verdict.info for verdict in verdicts) else (),
        failures=report_failures([verdict.failure for verdict in verdicts]),
    )


def report_failures(failures: Sequence[str | None]) -> dict[str, int]:
    """Logs the number of rows without a verdict and the most frequent reasons; as an error if no row has a verdict.

    Args:
        failures: per row why it has none; None: it has one.

    Returns:
        The number of rows by reason, of the most frequent reasons.
    """
    reasons = Counter(failure for failure in failures if failure is not None)
    if reasons:
        first = {failure: row for row, failure in reversed(list(enumerate(failures)))}
        commonest = "; ".join(
            f"{count} x {reason} (row {first[reason]}{' first' if count > 1 else ''})"
            for reason, count in reasons.most_common(3)
        )
        level = logging.ERROR if reasons.total() == len(failures) else logging.WARNING
        logger.log(level, "%d of %d responses have no reward: %s", reasons.total(), len(failures), commonest)
    return dict(reasons.most_common(3))
