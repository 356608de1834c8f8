"""What a loss function is given."""

import math

import torch

from gtpo_megatron.algorithms.losses.loss_inputs import LossInputs, first_of_response

MASK = torch.tensor([[False, True, True], [True, False, True], [False, False, False]])
VALUES = torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [9.0, 9.0, 9.0]])


def test_the_first_token_is_the_first_of_the_mask() -> None:
    assert first_of_response(VALUES, MASK).tolist() == [1.0, 3.0, 0.0]
    assert first_of_response(torch.full((3, 3), math.nan), torch.zeros_like(MASK)).tolist() == [0.0] * 3
    assert first_of_response(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0.0, 0.0]
    assert first_of_response(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)).shape == (0,)


def test_ratios_of_tokens_and_responses() -> None:
    logs = torch.where(MASK, torch.log(VALUES), 0.0)
    inputs = LossInputs(
        logprobs=logs, old_logprobs=torch.zeros_like(logs), log_ratios=logs, advantages=VALUES, mask=MASK
    )
    torch.testing.assert_close(inputs.ratio, torch.where(MASK, VALUES, 1.0))
    torch.testing.assert_close(inputs.response_ratio(is_geometric=False), torch.tensor([1.5, 3.5, 1.0]))
    torch.testing.assert_close(inputs.response_ratio(is_geometric=True), torch.tensor([2**0.5, 12**0.5, 1.0]))
    assert inputs.response_advantages.tolist() == [1.0, 3.0, 0.0]
