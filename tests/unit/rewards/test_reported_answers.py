"""Faults of graders that others have reported: each kind of answer, alone, in a batch, and in votes."""

import json

import pytest

from gtpo_megatron.companions.evaluate.evaluation_run import AnswerFinder
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.data.rows import generic_row
from gtpo_megatron.orchestration.stages.grading import reward_batch
from gtpo_megatron.rewards.function import resolve_final_answer
from gtpo_megatron.rewards.math_answer import math_answer
from gtpo_megatron.rewards.multiple_choice import multiple_choice
from gtpo_megatron.rewards.request import RewardRequest
from gtpo_megatron.rewards.reward_pool import RewardPool

MATH = "gtpo_megatron.rewards.math_answer:math_answer"
CHOICE = "gtpo_megatron.rewards.multiple_choice:multiple_choice"


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"\frac1{2^{99}}", r"\frac1{2^{98}}"),
        ("n=2,3,4", "n=1,2,3"),
        ("(0,1)", "(0,1.5)"),
        (r"\pm 2021", "2021"),
        ("12:00", "1:00"),
        (r"19,46,\text{ and }82", "21,36, and 82"),
        ("1-1/e", "1+1/e"),
    ],
)
def test_neighbours_that_math_verify_took_for_equal(given, reference):
    assert math_answer(rf"\boxed{{{given}}}", reference) == 0.0
    assert math_answer(rf"\boxed{{{reference}}}", given) == 0.0
    assert math_answer(rf"\boxed{{ {reference} }}", reference) == 1.0


def test_a_response_that_was_cut_in_a_box_earns_nothing_with_an_earlier_one():
    cut = r"so \boxed{5}. Wait, \boxed{12"
    with RewardPool(RewardConfig(function=MATH, num_workers=0)) as pool:
        found = reward_batch(pool.grade([RewardRequest(response=cut, answer="5", ended="length")]))
    assert found.rewards.tolist() == [0.0]
    assert AnswerFinder(resolve_final_answer(MATH))(cut) is None


BATCH = [
    (r"\boxed{5}", "5", (1.0, False)),
    (r"\boxed{5}", r"\frac{1}{", (0.0, True)),  # a reference that cannot be read
    (r"\boxed{" + "(" * 500 + "x", "5", (0.0, False)),
    (r"\boxed{\frac{1}{0}}", "5", (0.0, False)),
    (r"\boxed{100^{10^{9}}}", "10^{10^{10}}", (0.0, True)),  # too large to compare
    (r"\boxed{7}", "7", (1.0, False)),
]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_answer_that_cannot_be_read_moves_no_other_score(num_workers):
    with RewardPool(RewardConfig(function=MATH, num_workers=num_workers, timeout_s=30.0)) as pool:
        found = reward_batch(
            pool.grade([RewardRequest(response=response, answer=answer) for response, answer, _ in BATCH])
        )
    assert list(zip(found.rewards.tolist(), found.failed.tolist(), strict=True)) == [right for _, _, right in BATCH]
    votes = [AnswerFinder(resolve_final_answer(MATH))(response) for response, _, _ in BATCH]
    assert votes == ["5", "5", None, r"\frac{1}{0}", "100^{10^{9}}", "7"]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("033", ["33", "033", "33.0"], ["330", "3"]),
        (204, ["204", "204.0", "0204"], ["205", "2040"]),
        (204.0, ["204", "204.0"], ["20.4", "2040"]),
        ("a = 5 <<5=5>>5\n#### 1,450", ["1450", "1,450", r"1{,}450", r"\$1,450"], ["1", "450"]),
        (r"\$18", ["18", "$18", "18.00", r"18\text{ dollars}"], ["1.8"]),
        (r"50\%", ["50", "50\\%", "0.5", "1/2"], ["5", "0.05"]),
        (0.1, ["0.1", "1/10", r"10\%"], ["1", "0.01"]),
    ],
)
def test_a_reference_as_published_sets_write_it(answer, right, wrong):
    row = generic_row(json.loads(json.dumps({"problem": "?", "answer": answer})), "set.jsonl:1", "set")
    assert [math_answer(rf"\boxed{{{one}}}", row.answer) for one in right] == [1.0] * len(right)
    assert [math_answer(rf"\boxed{{{one}}}", row.answer) for one in wrong] == [0.0] * len(wrong)
    assert all(math_answer(rf"\boxed{{{row.answer.rpartition('####')[2].strip()}}}", one) == 1.0 for one in right)


CHOICES = [
    (r"\boxed{\text{E}}", "E"),
    (r"\boxed{E: A polygenic trait, such as height}", "E"),
    (r"first \boxed{A}, then \boxed{E}", "E"),
    (r"\boxed{A} and \boxed{E}", None),
    ("GRADE: CI", None),
    (r"\boxed{CI}", None),
    ("Answer: Correctly", None),
    ("Answer: C", "C"),
    (r"\boxed{C}. Wait, \boxed{D", None),
]


@pytest.mark.parametrize(("response", "letter"), CHOICES)
def test_a_choice_is_the_same_in_training_and_in_votes(response, letter):
    assert AnswerFinder(resolve_final_answer(CHOICE))(response) == letter
    for reference in "ACE":
        assert multiple_choice(response, reference) == float(letter == reference)
