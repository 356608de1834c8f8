"""(3) Decodes responses and grades them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.conversations.graded_text import GradedText
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import ShapeError
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward import RewardScorer

GRADING_SHARE = 0.75
"""Fraction of the stage's deadline after which rows without a verdict count as failed."""


@dataclass(frozen=True, slots=True)
class DecodedResponse:
    """A response as text, with what a reward may know of its tokens.

    Attributes:
        group_id: of its prompt.
        text: without special tokens.
        is_truncated: the length limit cut it.
        num_prompt_tokens: tokens of the rendered prompt.
        num_tokens: tokens of the response.
    """

    group_id: int
    text: str
    is_truncated: bool
    num_prompt_tokens: int
    num_tokens: int


class RewardGrader:
    """Decodes responses and grades them as answers to their problems."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scorer: RewardScorer) -> None:
        self._text = GradedText(tokenizer)
        self._scorer = scorer

    def grade(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """Grades every response, with a few groups' tokens in memory at a time.

        Raises:
            ShapeError: the group of a response is not among the prompts.
        """
        responses: list[DecodedResponse | None] = [None] * len(rollouts.places)
        for indices, group in rollouts.in_turn():
            for index, response in zip(indices, self.decode(group), strict=True):
                responses[index] = response
        return self.grade_decoded([response for response in responses if response is not None], prompts)

    def decode(self, rollouts: RolloutBatch) -> list[DecodedResponse]:
        """Every response as text."""
        lengths = rollouts.response_lengths.tolist()
        ids = [row[:length].tolist() for row, length in zip(rollouts.response_ids, lengths, strict=True)]
        columns = (rollouts.group_ids, rollouts.truncated, rollouts.prompt_lengths)
        return [
            DecodedResponse(group, text, truncated, num_prompt, length)
            for text, length, group, truncated, num_prompt in zip(
                self._text.decode(ids), lengths, *(column.tolist() for column in columns), strict=True
            )
        ]

    def grade_decoded(self, responses: Sequence[DecodedResponse], prompts: PromptBatch) -> RewardBatch:
        """Grades every response.

        Raises:
            ShapeError: the group of a response is not among the prompts.
        """
        problems = dict(zip(prompts.group_ids, prompts.problems, strict=True))
        unknown = [response.group_id for response in responses if response.group_id not in problems]
        if unknown:
            raise ShapeError(f"responses of group {unknown[0]} have no prompt in this batch of {len(problems)}")
        opens = {group: self._text.opens_thinking(problem.prompt_ids) for group, problem in problems.items()}
        return self._scorer.grade(
            [_request(one, problems[one.group_id], opens_thinking=opens[one.group_id]) for one in responses]
        )

    def close(self) -> None:
        """Ends the grading processes."""
        self._scorer.close()


def _request(response: DecodedResponse, problem: Problem, *, opens_thinking: bool) -> RewardRequest:
    return RewardRequest(
        response=response.text,
        answer=problem.answer,
        prompt=problem.prompt,
        columns_json=problem.columns_json,
        ended="length" if response.is_truncated else "stop",
        opens_thinking=opens_thinking,
        num_prompt_tokens=response.num_prompt_tokens,
        num_response_tokens=response.num_tokens,
    )


def build_grader(config: RunConfig, run_folder: Path | None) -> RewardGrader:
    """Builds the grader of a run; in its folder, the judge's answers are kept."""
    scorer = RewardScorer(
        config.reward,
        budget_s=GRADING_SHARE * config.cluster.stage_deadline_s,
        folder=run_folder,
        responses_per_step=config.data.prompts_per_step * config.rollout.group_size,
    )
    return RewardGrader(load_tokenizer(config.model.path), scorer)
