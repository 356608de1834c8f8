"""What a reward function may see of a response."""

import pytest

from gtpo_megatron.rewards.request import RewardRequest


@pytest.mark.parametrize(
    ("response", "content", "content_of_an_open_prompt"),
    [
        ("It is 7.", "It is 7.", ""),
        ("<think>\nI add.\n</think>\n\nIt is 7.", "It is 7.", "It is 7."),
        ("I add.\n</think>\n\nIt is 7.", "I add.\n</think>\n\nIt is 7.", "It is 7."),
        ("Should I write <think>? No.\n</think>\n7", "Should I write <think>? No.\n</think>\n7", "7"),
        ("\n<think>I add. Seven", "", ""),
        ("<think>\n\n</think>\n\n", "", ""),
        ("", "", ""),
    ],
)
def test_content_is_the_response_without_its_thinking(response, content, content_of_an_open_prompt):
    assert RewardRequest(response=response).content == content
    assert RewardRequest(response=response, opens_thinking=True).content == content_of_an_open_prompt
