import pytest

from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.errors import DataError
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.multiple_choice import final_answer, multiple_choice
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool


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


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{A, B}",
        r"\boxed{A,b,c,d}",
        r"\boxed{A and B}",
        r"\boxed{\text{A}, \text{B}}",
        r"\boxed{(A)(B)(C)(D)}",
        "Answer: A or B",
        "Answer: (A) or (B)",
        "Answer: (A) or B",
        "Answer: [A] / [B]",
        "Answer: A, B, C, D",
        "Answer: A, B or both",
        "Answer: A.B.C.D",
        "Answer: A. B. C. D",
        "Answer: A. 3 B. 4 C. 5",
        "Answer: A) 3 B) 4",
        "Answer: (a) 3, (b) 4",
        "Answer: A) or maybe it is (B)",
        "Answer: (A) apples (B) pears",
        r"Answer: \(A\), \(B\)",
    ],
)
@pytest.mark.parametrize("reference", ["A", "B"])
def test_a_response_that_names_several_choices_has_made_none(response, reference):
    """It looks right; but whoever lists all choices would always name the right one first, or last."""
    assert final_answer(response) is None
    assert multiple_choice(response, reference) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"Answer: \(B\)",
        r"Answer: $\textbf{(B)}$",
        r"Answer: \[ \mathrm{(B)} \]",
        r"\boxed{\textrm{B}}",
        r"\boxed{(\text{B})}",
        r"\boxed{\textbf{B} 12}",
        r"\boxed{\textbf{(B)}\ 12}",
        "Answer: (B) a triangle",
        "Answer: (B), since a is even",
        "Answer: (B) x",
        "Answer: B. f(x) = 2",
        "Answer: B. 12 apples, e.g. red ones.",
        "Answer: (B) vitamin C",
        "Answer: (B) I",
        "Answer: B, x = 3 and y = 4",
        r"Answer: B: \frac{a}{b}",
        "Answer: (B) Group (A) elements",
        "Answer: (B) (B)",
        r"\boxed{B: Hepatitis B: the virus}",
        r"\boxed{B. Vitamin C. It helps}",
        "Answer: B. Type A: common",
        "Answer: (B) C. elegans",
        r"\boxed{B. C. elegans}",
        "Answer: B. E. coli and more",
        "Answer: B) J. S. Bach",
        "Answer: B: F. Scott Fitzgerald",
    ],
)
def test_the_text_of_a_choice_is_not_taken_for_another_choice(response):
    assert final_answer(response) == "B"


@pytest.mark.parametrize("reference", ["12", "", "Blue"])
def test_a_reference_that_is_no_choice_is_an_error(reference):
    with pytest.raises(DataError, match="is no choice"):
        multiple_choice(r"\boxed{B}", reference)


def test_it_is_named_like_any_reward():
    name = "gtpo_megatron.rewards.multiple_choice:multiple_choice"
    with RewardPool(RewardConfig(function=name, num_workers=1, timeout_s=5.0)) as pool:
        assert reward_batch(
            pool.grade([RewardRequest(response=one, answer="B") for one in (r"\boxed{B}", "Answer: C")])
        ).rewards.tolist() == [1.0, 0.0]


def test_votes_are_counted_by_letter():
    assert final_answer("Answer: (b) twelve") == "B"
    assert final_answer("nothing") is None
