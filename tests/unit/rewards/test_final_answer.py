import time

import pytest

from gtpo_megatron.rewards.final_answer import final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        (r"\boxed{a} \boxed{b", None),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"} { \boxed {5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5}. As asked, in \boxed{ }.", "5"),
        ("nothing", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 34",
        "So\n  answer: 34  \nthat is all",
        "**Answer:** 34",
        "**Answer: 34**",
        "Answer: $34$.",
        "Answer: `34`",
        "Answer:\n\n34\n",
        "The final answer: 34",
        "## Final Answer:\nAnswer: 34",
        "> Answer : 34",
        "1. Answer: 34",
        "So:\n 2) **Answer:** 34",
        "Answer\uff1a34",
        "Answer: 33\nno,\nAnswer: 34",
        r"Answer: \boxed{34}",
        r"Answer: clearly \boxed{34} apples",
        "\\boxed{33}\nAnswer: 34",
        "Answer: 33\nso \\boxed{34}",
        r"\boxed{ $34$. }",
    ],
)
def test_the_last_box_or_answer_line_whichever_is_later(text):
    assert final_answer(text) == "34"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "34",
        "The answer is 34",
        "Answer:",
        "Answer: \n\n",
        "My answer: 34",
        "answers: 34",
        "Answer 34",
        "Answer: $$",
        r"\boxed{34",
    ],
)
def test_nothing_else_is_an_answer(text):
    assert final_answer(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{}", ""),  # nothing else to take
        (r"\boxed{5}. As asked, in \boxed{}.", "5"),
        (r"so \boxed{5}. Wait, \boxed{12", None),  # cut
        (r"so \boxed{5}. Wait, \boxed{\frac{1}{2}", None),
        ("Answer: 5\nso \\boxed{12", None),
        (r"\boxed{5} is it. Answer: \boxed{1", None),
        ("\\boxed{12 is wrong\nAnswer: 5", "5"),
        (r"\boxed{12 is wrong, so \boxed{5}", "5"),
        (r"\boxed{20} and \boxed{30}", "20, 30"),
        (r"$\boxed{20}$, $\boxed{30}$ or \(\boxed{40}\)", "20, 30, 40"),
        (r"\boxed{20}, \boxed{20}", "20"),
        (r"\boxed{20}, no: \boxed{30}", "30"),
        (r"\boxed{20} \boxed{30}", "30"),
        (r"\boxed{20}\ ,\quad\mathrm{and}\ \boxed{30}", "20, 30"),
        (r"x &= \boxed{1+1} \\ &= \boxed{2}", "2"),
        (r"$2x = \boxed{4}$, so $x = \boxed{2}$", "2"),
        (r"$x = \boxed{4}$ and $y = \boxed{2}$", "x=4, y=2"),
        ("Answer: \\[\n5\n\\]", "5"),
        ("Answer:\n$$\n\\frac12\n$$\n", r"\frac12"),
    ],
)
def test_cut_empty_and_several_boxes(text, expected):
    assert final_answer(text) == expected


BLOWN_UP = ["Answer:" + " " * 10**6, "answer" + "\t" * 10**6, "\n" * 10**6, "Answer:\n" * 10**5, "Answer: " * 10**5]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*BLOWN_UP, "\\boxed{" * 300_000, "*" * 10**6 + "answer", r"\boxed{1}, " * 10**5], ids=range(8)
)
def test_megabytes_take_no_longer_than_prose(text):
    start = time.process_time()
    final_answer(text)
    assert time.process_time() - start < 5.0  # 0.3 s at most; quadratic time would be hours
