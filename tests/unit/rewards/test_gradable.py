"""A reference that no response could earn is seen when a set is read: its own text in a box is graded."""

import time

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.rewards.function import answer_complaint, resolve_rewards
from gtpo_megatron.rewards.math_answer import math_answer
from recipes.tiny_cpu import ASSETS
from tests.unit.test_bad_input import GOOD, complaint, rows

MATH = "gtpo_megatron.rewards.math_answer:math_answer"
CHOICE = "gtpo_megatron.rewards.multiple_choice:multiple_choice"

UNEARNED = {
    MATH: [r"\frac{1}{", "}{", r"\text{}", r"\boxed{5", "5}", "x" * 2_001, "(" * 40 + "x" + ")" * 40, "$$", "..."],
    CHOICE: ["2", "A C", "AC", "Blue", "B or C", "(A) (B)", "3."],
}
EARNED = {
    MATH: [
        "5",
        "9 (apples)",
        "4.5e33",
        r"\frac12",
        "12 apples and 7 pears",
        "?",
        "204_5",
        "10^{10^{10}}",
        r"\text{none}",
    ],
    CHOICE: ["B", "(c)", r"\text{(B)}", "B. 12", "E: A polygenic trait"],
}


@pytest.mark.parametrize(("name", "answer"), [(name, one) for name, answers in UNEARNED.items() for one in answers])
def test_what_nobody_could_earn_is_said(name, answer):
    weighted = resolve_rewards(f"0.1*tests.unit.rewards.reward_forms:stated + 0.9*{name}")
    assert "the reference answer" in answer_complaint(weighted, answer)


@pytest.mark.parametrize(("name", "answer"), [(name, one) for name, answers in EARNED.items() for one in answers])
def test_nothing_is_said_of_the_others(name, answer):
    assert answer_complaint(resolve_rewards(name), answer) == ""


def test_every_reference_is_earned_by_its_own_text_or_refused():
    for answer in [*UNEARNED[MATH], *EARNED[MATH]]:
        if not answer_complaint(resolve_rewards(MATH), answer):
            assert math_answer(rf"\boxed{{{answer}}}", answer) == 1.0


def test_tens_of_thousands_of_references_take_seconds():
    functions = resolve_rewards(MATH)
    start = time.process_time()
    for number in range(20_000):
        assert not answer_complaint(functions, str(number))
        assert not answer_complaint(functions, rf"\frac{{{number}\sqrt{{3}}}}{{7}}")
    assert time.process_time() - start < 20.0  # 2 s


@pytest.mark.parametrize("option", ["--data.train-path", "--evaluation.path"])
@pytest.mark.parametrize(("name", "answer"), [(MATH, r"\frac{1}{"), (CHOICE, "2"), (CHOICE, "A C")])
def test_config_refuses_such_a_row_of_any_set_by_its_place(capsys, tmp_path, option, name, answer):
    good = {**GOOD, "answer": "B"} if name == CHOICE else GOOD
    path = rows(tmp_path, good, {"prompt": "another", "answer": answer})
    others = {"--data.train-path": path, "--evaluation.path": path, option: path}
    status, text = complaint(capsys, "--reward.function", name, *(word for pair in others.items() for word in pair))
    assert status != 0
    assert "rows.jsonl:2: " in text
    assert "--data.ungradable-rows drop" in text or "data.ungradable_rows=drop" in text


@pytest.mark.parametrize(("name", "answer"), [(MATH, r"\frac{1}{"), (CHOICE, "2"), (CHOICE, "A C")])
def test_a_benchmark_with_such_a_row_is_refused_without_an_option_that_is_not_there(capsys, tmp_path, name, answer):
    path = rows(tmp_path, {"problem": "one", "answer": "B"}, {"problem": "two", "answer": answer})
    assert (
        dispatch.run(
            ["evaluate", str(ASSETS / "tiny_qwen2"), "--benchmarks", f"mine={path}", "--reward.function", name]
        )
        != 0
    )
    text = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl:2: " in text
    assert "reference answer" in text
    assert "ungradable" not in text
