"""(3) From sampled tokens to outcome rewards: decode, then grade."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.batch import PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import ShapeError
from gtpo_megatron.rewards.reward import RewardScorer

GRADING_SHARE = 0.75
"""Of a stage's deadline: rows that have no verdict by then are failed and counted, so that the stage ends in time."""


class RewardGrader:
    """Decodes responses and grades them against their problem's answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scorer: RewardScorer) -> None:
        self._tokenizer = tokenizer
        self._scorer = scorer

    def decode(self, rollouts: RolloutBatch) -> list[str]:
        """The text of every response."""
        ids = [
            row[:length].tolist()
            for row, length in zip(rollouts.response_ids, rollouts.response_lengths.tolist(), strict=True)
        ]
        texts: list[str] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    def grade(self, texts: Sequence[str], group_ids: Sequence[int], prompts: PromptBatch) -> RewardBatch:
        """One verdict per response.

        Raises:
            ShapeError: a response belongs to none of the prompts.
        """
        answers = {group: problem.answer for group, problem in zip(prompts.group_ids, prompts.problems, strict=True)}
        unknown = [group for group in group_ids if group not in answers]
        if unknown:
            raise ShapeError(f"responses of group {unknown[0]} have no prompt in this batch of {len(answers)}")
        return self._scorer.score(texts, [answers[group] for group in group_ids])

    def close(self) -> None:
        """Ends the grading processes."""
        self._scorer.close()


def build_grader(config: RunConfig) -> RewardGrader:
    """The grader that a run's configuration asks for."""
    reward = config.reward
    scorer = RewardScorer(
        reward.function,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_limit_mib=reward.memory_limit_mib,
        budget_s=GRADING_SHARE * config.cluster.stage_deadline_s,
    )
    return RewardGrader(load_tokenizer(config.model.path), scorer)
