import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from gtpo_megatron.errors import DataError
from gtpo_megatron.rewards.math_answer import math_answer


@pytest.mark.parametrize(
    ("boxed", "answer", "expected"),
    [
        ("42", "42", 1),
        ("-7", "-7", 1),
        ("7", "-7", 0),
        ("007", "7", 1),
        ("7.0", "7", 1),
        ("1,000", "1000", 1),
        ("10^{3}", "1000", 1),
        (r"\frac{1}{2}", "0.5", 1),
        ("1/2", r"\frac12", 1),
        ("0.3333", r"\frac13", 0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1),
        (r"\{1,2\}", r"\{2,1\}", 1),
        (r"\{1,2,3\}", r"\{2,1\}", 0),
        ("[1,2)", "[1,2)", 1),
        ("(1,2)", "[1,2]", 0),
        (r"5\text{ cm}", "5", 1),
        (r"50\%", r"50\%", 1),
        ("x=5", "5", 1),
        ("$4$", "4", 1),
        ("3.14", r"\pi", 0),
        ("4", r"\boxed{4}", 1),
        ("4", "$4$", 1),
        ("", "7", 0),
        (r"\frac{1}{", "7", 0),
        ("seven", "7", 0),
        # fractions
        (r"\tfrac12", "0.5", 1),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", 1),
        (r"\frac{2}{4}", r"\frac12", 1),
        (r"\sqrt{2}/2", r"\frac{1}{\sqrt2}", 1),
        (r"5\frac12", "5.5", 1),
        (r"5\frac12", r"\frac52", 0),
        ("1/2", "2", 0),
        (r"\frac{a}{b}", r"\frac{b}{a}", 0),
        ("0.33", r"\frac13", 0),
        ("1:2", r"\frac12", 1),
        ("2:1", "1:2", 0),
        # numbers as people write them
        ("073", "73", 1),
        ("27", "27.0", 1),
        ("+7", "7", 1),
        ("34.", "34", 1),
        ("100{,}000", "100000", 1),
        ("1.000", "1000", 0),
        ("12", "1,2", 0),
        ("10^3", "103", 0),
        (r"1.5\times10^3", "1500", 1),
        ("2^{100}", "1267650600228229401496703205376", 1),
        ("1267650600228229401496703205377", "2^{100}", 0),
        ("2.9999999", "3", 0),
        (r"\binom{5}{2}", "10", 1),
        (r"\log_2 8", "3", 1),
        (r"\infty", r"-\infty", 0),
        # units, money, degrees, percent
        ("5 cm", "5", 1),
        (r"5\mathrm{~m}", "5", 1),
        ("5", r"5\text{ cm}", 1),
        (r"\$5", "5", 1),
        (r"90^\circ", "90", 1),
        ("10%", "0.1", 1),
        ("50%", "50", 1),
        ("5%", "50%", 0),
        # intervals and inequalities
        (r"x\in(1,2)", "(1,2)", 1),
        ("(-3, 2)", "(2, -3)", 0),
        (r"[0,1)\cup(1,2]", r"[0,2]\setminus\{1\}", 1),
        ("5>x", "x<5", 1),
        ("x<5", "x>5", 0),
        # sets and several answers
        ("2,1", "1,2", 1),
        (r"1 \text{ or } 2", "1,2", 1),
        ("x=1,x=2", "1,2", 1),
        (r"7 \pm 2", "9,5", 1),
        ("3", "3, 5", 0),
        (r"3 \text{ or } 5", "3", 0),
        # expressions, tuples, matrices, words
        ("x^2+2x+1", "(x+1)^2", 1),
        ("(x+1)^2", "x^2+1", 0),
        ("x=5", "y=5", 0),
        ("f(x)=x+1", "x+1", 1),
        ("3+4i", "4i+3", 1),
        ("3-4i", "3+4i", 0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", 0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", 1),
        ("east", r"\text{east}", 1),
        (r"\text{east}", r"\text{west}", 0),
        ("B", r"\text{(B)}", 1),
    ],
)
def test_answers_are_compared_as_mathematics(boxed, answer, expected):
    assert math_answer(f"So it is \\boxed{{{boxed}}}.", answer) == expected


def test_a_line_of_the_form_that_dapo_asks_for_is_graded():
    assert math_answer("We add.\nAnswer: 34", "34") == 1.0
    assert math_answer(r"Answer: $\frac{68}{2}$", "34") == 1.0
    assert math_answer("Answer: 35", "34") == 0.0
    assert math_answer("Answer: 34\nAnswer: 35", "34") == 0.0


def test_only_the_last_box_counts_and_an_answer_outside_a_box_does_not():
    assert math_answer(r"\boxed{3}, no: \boxed{4}", "4") == 1.0
    assert math_answer(r"\boxed{4}, no: \boxed{3}", "4") == 0.0
    assert math_answer("The answer is 4", "4") == 0.0
    assert math_answer(r"\boxed{4", "4") == 0.0


@pytest.mark.slow
def test_megabytes_of_open_boxes_and_a_huge_box_are_wrong_at_once():
    start = time.process_time()
    assert math_answer("\\boxed{" * 300_000, "4") == 0.0
    assert math_answer("\\boxed{" + "9" * 1_000_000 + "}", "4") == 0.0
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize("answer", ["", "  ", "$$", r"\boxed{ }"])
def test_nothing_can_be_graded_against_an_empty_reference(answer):
    with pytest.raises(DataError, match="reference answer is empty"):
        math_answer(r"\boxed{4}", answer)


ORDINARY_ANSWERS = r"""
42 | \frac{1}{2} | 0.5 | 2\sqrt{2} | (1, 2) | [1,2) | \{1,2\} | x^2+1 | x=5 | x<5 | \text{east} | 50\% | \infty | \pi
1,000 | seven | \begin{pmatrix}1\\2\end{pmatrix} | 3i+1 | a:b | ? | 90^\circ | \$5 | -\frac{7}{3} | (-\infty, 3]
"""


@pytest.mark.parametrize("text", [text.strip() for text in re.split(r"[|\n]", ORDINARY_ANSWERS) if text.strip()])
def test_the_identity_short_cut_agrees_with_math_verify(text):
    assert verify(parse(f"\\boxed{{{text}}}"), parse(f"\\boxed{{{text}}}"))
    assert math_answer(f"\\boxed{{{text}}}", text) == 1.0


@pytest.mark.parametrize("answer", [r"\text{}", "}{"])
def test_a_reference_that_says_nothing_to_the_parser_is_an_error(answer):
    with pytest.raises(DataError, match="cannot parse the reference answer"):
        math_answer(r"\boxed{4}", answer)


@settings(max_examples=60)
@given(st.integers(-(10**9) + 1, 10**9 - 1), st.one_of(st.none(), st.integers(-3, 3)))
def test_the_integer_short_cut_agrees_with_math_verify(answer, offset):
    given_answer = -answer if offset is None else answer + offset
    gold, found = parse(f"\\boxed{{{answer}}}"), parse(f"\\boxed{{{given_answer}}}")
    assert math_answer(f"\\boxed{{{given_answer}}}", str(answer)) == float(verify(gold, found))
    assert math_answer("\\boxed{-0}", "0") == float(verify(parse("\\boxed{0}"), parse("\\boxed{-0}")))
