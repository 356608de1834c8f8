import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.multiple_choice import final_answer, multiple_choice
from gtpo_megatron.rewards.reward import RewardScorer


@pytest.mark.parametrize(
    "response",
    [
        r"so \boxed{B}",
        r"so \boxed{\text{(B)}}",
        r"\boxed{\textbf{(B) }12}",
        r"\boxed{A} no \boxed{b}",
        "Answer: B",
        "Answer: (B) 12 apples",
        "Answer: B. 12",
        "Answer: [B]",
        "**Answer:** B",
    ],
)
@pytest.mark.parametrize("reference", ["B", "(B)", "b", r"\text{(B)}"])
def test_the_letter_counts(response, reference):
    assert multiple_choice(response, reference) == 1.0


@pytest.mark.parametrize(
    "response", ["B", "the answer is B", r"\boxed{C}", r"\boxed{Blue}", r"\boxed{12}", r"\boxed{}", "Answer: B 12", ""]
)
def test_another_letter_or_none_is_wrong(response):
    assert multiple_choice(response, "B") == 0.0


@pytest.mark.parametrize("reference", ["12", "", "Blue"])
def test_a_reference_that_is_no_choice_is_an_error(reference):
    with pytest.raises(DataError, match="is no choice"):
        multiple_choice(r"\boxed{B}", reference)


def test_it_is_named_like_any_reward():
    name = "gtpo_megatron.rewards.multiple_choice:multiple_choice"
    with RewardScorer(name, num_workers=1, timeout_s=5.0) as scorer:
        assert scorer.score([r"\boxed{B}", "Answer: C"], ["B", "B"]).rewards.tolist() == [1.0, 0.0]


def test_votes_are_counted_by_letter():
    assert final_answer("Answer: (b) twelve") == "B"
    assert final_answer("nothing") is None
