"""Numbers too large to write out are seen before a parser tries to; all others are left to it."""

import time

import pytest

from gtpo_megatron.rewards.magnitude import is_too_large
from gtpo_megatron.rewards.math_answer import math_answer

TOO_LARGE = [
    "10^{10^{10}}",
    "9^{9^{9^{9}}}+1",
    "10 ^ {10 ^ {10}}",
    "10**10**10",
    r"\frac{1}{10^{10^{10}}}",
    "10^{-10^{10}}",
    "1.5^{100000000}",
    "2^{1,000,000}",
    "(10)^{(1000000)}",
    "2^{2^{2^{2^{2}}}}",
    "100000!",
    "(100!)!",
    "{10^6}!",
    "9^" * 500 + "9",
    "2!" * 900 + "^{99999999}",
]
FINE = [
    "42",
    "2^{10}",
    "2^{10000}",
    "2^{30000}",
    "2019!",
    "2^{2^{2^{2}}}",
    "3^{3^{3}}",
    "1^{999999999999}",
    "0^{5}",
    "x^{y^{z}}",
    "e^{x^{2}}",
    "10^{-3}",
    "0.5^{10}",
    "(2)^{(3)}",
    "9" * 2000,
    r"\frac{1}{2}",
    "",
    "^{}!",
]


@pytest.mark.parametrize("text", TOO_LARGE)
def test_too_large(text):
    start = time.perf_counter()
    assert is_too_large(text)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("text", FINE)
def test_fine(text):
    start = time.perf_counter()
    assert not is_too_large(text)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("text", TOO_LARGE[:6])
def test_such_an_answer_is_wrong_at_once(text):
    start = time.perf_counter()
    assert math_answer(rf"so \boxed{{{text}}}", "4") == 0.0
    assert time.perf_counter() - start < 2.0


def test_such_a_reference_equals_its_own_text_only():
    assert math_answer(r"\boxed{10^{10^{10}}}", "10^{10^{10}}") == 1.0
    assert math_answer(r"\boxed{10^{10^{ 10 }}}", "10^{10^{10}}") == 1.0
    with pytest.raises(ValueError, match="too large to compare"):
        math_answer(r"\boxed{100^{10^{9}}}", "10^{10^{10}}")
