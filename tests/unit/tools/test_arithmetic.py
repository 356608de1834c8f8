import random
import re

import pytest

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rewards.math_answer import math_answer
from tools.arithmetic import (
    ArithmeticTask,
    Term,
    canonical,
    evaluate,
    prompt_text,
    render,
    sample_expression,
    sample_solution,
    sample_steps,
)


def value_of(text):
    """An evaluator of its own: products first, then left to right."""
    total = 0
    for sign, product in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", text):
        number = 1
        for factor in product.split("*"):
            number *= int(factor)
        total += -number if sign == "-" else number
    return total


def expressions(task, num, seed=0):
    rng = random.Random(seed)
    return [sample_expression(task, rng) for _ in range(num)]


def test_expressions_keep_their_bounds():
    task = ArithmeticTask(min_terms=2, max_terms=4, max_operand=12, max_factor=5, max_products=2, max_answer=40)
    seen_terms, seen_products = set(), set()
    for expression in expressions(task, 500):
        assert 1 <= value_of(render(expression)) == evaluate(expression) <= 40
        assert expression[0].sign == 1
        products = [term for term in expression if len(term.factors) == 2]
        seen_terms.add(len(expression))
        seen_products.add(len(products))
        assert all(2 <= factor <= 5 for term in products for factor in term.factors)
        assert all(2 <= term.factors[0] <= 12 for term in expression if len(term.factors) == 1)
    assert (seen_terms, seen_products) == ({2, 3, 4}, {0, 1, 2})


def test_every_step_of_every_solution_is_right_and_keeps_the_value():
    task = ArithmeticTask(max_products=2)
    rng = random.Random(1)
    for expression in expressions(task, 1500):
        answer = evaluate(expression)
        for step in sample_steps(expression, rng, leap_rate=0.4):
            assert value_of(step.operands) == step.result >= 0
            assert value_of(render(step.remaining)) == answer
            assert not render(step.remaining).startswith("-")
        solution = sample_solution(expression, rng, leap_rate=0.4)
        assert math_answer(solution, str(answer)) == 1.0
        for left, right in re.findall(r"([\d*+-]+)=(\d+)", solution):
            assert value_of(left) == int(right)


def test_solutions_are_real_choices():
    expression = (Term(1, (7, 8)), Term(1, (35,)), Term(-1, (19,)), Term(1, (42,)))
    rng = random.Random(2)
    orders = {tuple(step.operands for step in sample_steps(expression, rng, leap_rate=0.3)) for _ in range(400)}
    assert len(orders) > 20
    assert prompt_text(expression).startswith("Compute 7*8+35-19+42.")


def test_leap_rate_decides_how_many_terms_a_step_takes():
    def longest(rate):
        rng = random.Random(3)
        steps = [s for e in expressions(ArithmeticTask(), 200) for s in sample_steps(e, rng, leap_rate=rate)]
        return {len(re.findall(r"\d+", step.operands)) for step in steps if "*" not in step.operands}

    assert longest(0.0) == {2}
    assert longest(0.5) == {2, 3}


def test_canonical_ignores_order_alone():
    a, b, c = Term(1, (7, 8)), Term(1, (35,)), Term(-1, (19,))
    assert canonical((a, b, c)) == canonical((b, c, Term(1, (8, 7))))
    assert canonical((a, b, c)) != canonical((a, b, Term(1, (19,))))


def test_a_seed_gives_the_same_text():
    def texts(seed):
        rng = random.Random(seed)
        return [sample_solution(sample_expression(ArithmeticTask(), rng), rng, leap_rate=0.3) for _ in range(20)]

    assert texts(5) == texts(5) != texts(6)


@pytest.mark.parametrize(
    "wrong", [{"min_terms": 1}, {"min_terms": 5, "max_terms": 4}, {"max_operand": 1}, {"max_products": -1}]
)
def test_bounds_no_problem_can_meet_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(reversed(wrong))):
        ArithmeticTask(**wrong)
