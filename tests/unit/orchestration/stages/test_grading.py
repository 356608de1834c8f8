"""Decoding and grading: answers find their responses, whatever the order."""

import pytest
import torch

from gtpo_megatron.batch import Problem, PromptBatch, RolloutBatch, mask_of_lengths
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import ShapeError
from gtpo_megatron.orchestration.stages.grading import RewardGrader
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.rewards.reward_pool import RewardPool


class Letters:
    """Token i is the i-th letter; token 0 is special."""

    chat_template = None
    all_special_tokens = ()

    def get_vocab(self):
        return {}

    def decode(self, row, skip_special_tokens):
        assert not skip_special_tokens, "a prompt's"
        return "".join(map(str, row))

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(96 + token) for token in row if token) for row in rows]


def exact(response, answer):
    return float(response == answer)


def rollouts(group_ids):
    return RolloutBatch(
        prompt_ids=torch.ones(3, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(3, dtype=torch.int64),
        response_ids=torch.tensor([[1, 2, 0], [3, 0, 9], [1, 2, 3]]),
        response_lengths=torch.tensor([3, 2, 3]),
        loss_mask=mask_of_lengths(torch.tensor([3, 2, 3]), 3),
        rollout_logprobs=torch.zeros(3, 3),
        group_ids=torch.tensor(group_ids),
        truncated=torch.zeros(3, dtype=torch.bool),
        policy_version=0,
    )


def prompts():
    problems = [Problem(problem_id=a, prompt_ids=(1,), answer=a) for a in ("ab", "c")]
    return PromptBatch(problems=tuple(problems), group_ids=(70, 71))


def test_special_tokens_and_padding_are_not_graded():
    grader = RewardGrader(Letters(), RewardPool(RewardConfig(function=f"{__name__}:exact", num_workers=0)))
    found = grader.grade(RolloutHandle.of(rollouts([70, 71, 70])), prompts())
    assert found.rewards.tolist() == [1.0, 1.0, 0.0]
    assert not found.failed.any()
    grader.close()


def test_a_response_of_no_prompt_is_an_error():
    grader = RewardGrader(Letters(), RewardPool(RewardConfig(function=f"{__name__}:exact", num_workers=0)))
    with pytest.raises(ShapeError, match="group 72 have no prompt"):
        grader.grade(RolloutHandle.of(rollouts([70, 72, 70])), prompts())
