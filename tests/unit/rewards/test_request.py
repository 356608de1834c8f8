"""What a reward function may see of a response."""

import pytest

from gtpo_megatron.rewards.request import RewardRequest


@pytest.mark.parametrize(
    ("response", "content", "content_of_an_open_prompt"),
    [
        ("It is 7.", "It is 7.", ""),
        ("<think>\nI add.\n</think>\n\nIt is 7.", "It is 7.", "It is 7."),
        ("I add.\n</think>\n\nIt is 7.", "It is 7.", "It is 7."),
        ("\n<think>I add. Seven", "", ""),
        ("<think>\n\n</think>\n\n", "", ""),
        ("Write <think> first, </think> last.", "Write <think> first, </think> last.", None),
        ("", "", ""),
    ],
)
def test_content_is_the_response_without_its_thinking(response, content, content_of_an_open_prompt):
    assert RewardRequest(response=response).content == content
    if content_of_an_open_prompt is not None:
        assert RewardRequest(response=response, opens_thinking=True).content == content_of_an_open_prompt
